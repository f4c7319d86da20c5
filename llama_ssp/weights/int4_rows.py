"""Int4 weights as rows of bytes, which are cut, joined, reordered and moved like the rows of any weight.

    row   | group | group | ...                                          uint8, a row per output
    group | 64 bytes: input b in the low, b + 64 in the high half of byte b | its word, 4 bytes |
    word  = the scale in fp32, whose lowest 5 bits are replaced by the zero

A weight is scale * (code - zero): codes are 0 to 15, zeros 0 to 16. Scales from 16-bit files are exact, since they have
none of these bits.

Shapes: O outputs, I inputs, G groups of 128 inputs, W bytes of a row.
"""

import torch
from torch import Tensor

from llama_ssp.settings.formats import INT4_GROUP as GROUP
from llama_ssp.settings.formats import WORD_BYTES

CODE_BYTES = GROUP // 2
GROUP_BYTES = CODE_BYTES + WORD_BYTES
ZERO_BITS = 31
"""Those bits of a word that hold the zero."""


def pack(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    """Pack codes (uint8), scales (fp32) and zeros (integers) into rows (O, W)."""
    low, high = codes_OI.unflatten(1, (-1, 2, CODE_BYTES)).unbind(2)
    words_OG = words_of(scales_OG, zeros_OG)
    return torch.cat([low | high << 4, words_OG[..., None].view(torch.uint8)], dim=2).flatten(1)


def words_of(scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    """The words (int32) of scales (fp32) and zeros (integers)."""
    return scales_OG.contiguous().view(torch.int32) & ~ZERO_BITS | zeros_OG.to(torch.int32)


def unpack_codes(bytes_OGB: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the first and of the last 64 inputs of each group, from its 64 bytes."""
    return bytes_OGB & 15, bytes_OGB >> 4


def split(rows_OW: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into their bytes of codes (O, I / 2) and their words (O, G), both copied."""
    groups = rows_OW.unflatten(1, (-1, GROUP_BYTES))
    words = groups[..., CODE_BYTES:].contiguous().view(torch.int32)
    return groups[..., :CODE_BYTES].flatten(1).contiguous(), words.squeeze(2)


def scales_of(words: Tensor) -> Tensor:
    """The scales (fp32) of words."""
    return (words & ~ZERO_BITS).view(torch.float32)


def zeros_of(words: Tensor) -> Tensor:
    """The zeros (int32) of words."""
    return words & ZERO_BITS

"""Int4 weights in `byte_rows`.

    group | input b in the low, b + I / 2 in the high half of byte b | its word |
    word  = the scale in fp32, whose lowest 5 bits are replaced by the zero

A weight is scale * (code - zero): codes are 0 to 15, zeros 0 to 16. Scales from 16-bit files are exact, since they have
none of these bits.

Shapes: O outputs, I inputs, of a group or of all, G groups of 128, 64 or 32 inputs, B bytes of a group, W = B + 4.
"""

import torch
from torch import Tensor

from llama_ssp.weights import byte_rows

ZERO_BITS = 31
"""Those bits of a word that hold the zero."""


def pack(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    """Pack codes (uint8), scales (fp32) and zeros (integers) into rows (O, G, W)."""
    low, high = codes_OI.unflatten(1, (scales_OG.shape[1], 2, -1)).unbind(2)
    return byte_rows.join(low | high << 4, words_of(scales_OG, zeros_OG))


def words_of(scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    """The words (int32) of scales (fp32) and zeros (integers)."""
    return scales_OG.contiguous().view(torch.int32) & ~ZERO_BITS | zeros_OG.to(torch.int32)


def unpack_codes(bytes_OGB: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the first and of the last half of the inputs of each group, from its bytes."""
    return bytes_OGB & 15, bytes_OGB >> 4


def scales_of(words: Tensor) -> Tensor:
    """The scales (fp32) of words."""
    return (words & ~ZERO_BITS).view(torch.float32)


def zeros_of(words: Tensor) -> Tensor:
    """The zeros (int32) of words."""
    return words & ZERO_BITS

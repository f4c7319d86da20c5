"""Int4 weights in `byte_rows`.

    group | input b in the low, b + I / 2 in the high half of byte b | its order | its word |
    order = which input each one is, in 2 bytes; where the file scatters groups, so that inputs are sorted by them
    word  = the scale in fp32, whose lowest 5 bits are replaced by the zero

A weight is scale * (code - zero): codes are 0 to 15, zeros 0 to 16. Scales from 16-bit files are exact, since they have
none of these bits.

A part of the inputs of such a file has parts of all groups: groups of 32 with GAP for inputs that there are none of.

Shapes: O outputs, I inputs, of a group or of all, G groups of 128, 64 or 32 inputs, B bytes of a group, W = B + 4.
"""

import torch
from torch import Tensor

from llama_ssp.storage.formats import INT4_GROUPS, INT4_ZERO_BITS
from llama_ssp.weights import byte_rows

GAP = 2**16 - 1
"""In an order; inputs are fewer."""


def pack(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor, order_I: Tensor | None = None) -> Tensor:
    """Pack codes (uint8), scales (fp32) and zeros (integers), and the order of the inputs, into rows (O, G, W)."""
    bytes_OGB = pack_codes(codes_OI, scales_OG.shape[1])
    if order_I is not None:
        order_GB = order_I.to(torch.int16).view(scales_OG.shape[1], -1).view(torch.uint8)
        bytes_OGB = torch.cat([bytes_OGB, order_GB.expand(len(codes_OI), -1, -1)], dim=2)
    return byte_rows.join(bytes_OGB, words_of(scales_OG, zeros_OG))


def pack_codes(codes_OI: Tensor, num_groups: int) -> Tensor:
    """The bytes (O, G, B) of codes, as drawn above."""
    low, high = codes_OI.unflatten(1, (num_groups, 2, -1)).unbind(2)
    bytes_OGB: Tensor = low | high << 4
    return bytes_OGB


def split(rows_OGW: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split rows into the bytes of codes (O, I / 2), the words (O, G), and the order (O, I) if they have one."""
    bytes_OI, words_OG = byte_rows.split(rows_OGW)
    bytes_OGB = bytes_OI.unflatten(1, (words_OG.shape[1], -1))
    if 2 * bytes_OGB.shape[2] in INT4_GROUPS:
        return bytes_OI, words_OG, None
    num_codes = bytes_OGB.shape[2] // 5
    order_OI = bytes_OGB[..., num_codes:].contiguous().view(torch.int16).flatten(1).int() & GAP
    return bytes_OGB[..., :num_codes].flatten(1), words_OG, order_OI


def words_of(scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    """The words (int32) of scales (fp32) and zeros (integers)."""
    return scales_OG.contiguous().view(torch.int32) & ~INT4_ZERO_BITS | zeros_OG.to(torch.int32)


def unpack_codes(bytes_OGB: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the first and of the last half of the inputs of each group, from its bytes."""
    return bytes_OGB & 15, bytes_OGB >> 4


def scales_of(words: Tensor) -> Tensor:
    """The scales (fp32) of words."""
    return (words & ~INT4_ZERO_BITS).view(torch.float32)


def zeros_of(words: Tensor) -> Tensor:
    """The zeros (int32) of words."""
    return words & INT4_ZERO_BITS


def codes_of_words(words: Tensor) -> Tensor:
    """The codes of int32 words (N, M), shape (N, 8 M)."""
    pairs = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)

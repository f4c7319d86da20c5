"""Packed weights as rows of bytes, which are cut, joined, reordered and moved like the rows of any weight.

    row           | group | group | ...                 uint8, a row per output
    group         | its weights | its word, 4 bytes |   the last dimension tells the size of a group

    int8, fp8, nf4, fp4    weights as in files, and their scale in fp32
    int4                   input b in the low, b + I / 2 in the high half of byte b; the order of the inputs in 2 bytes
                           each, where the file scatters groups; the scale, whose lowest 5 bits are replaced by the zero
    mxfp4, nvfp4           codes as of int4; the scale of 32 inputs in E8M0, or two of 16 in E4M3; the factor of the
                           output in fp32

An int4 weight is scale * (code - zero): codes are 0 to 15, zeros 0 to 16. Scales from 16-bit files are exact, since
they have none of these bits. Inputs of scattered groups are sorted by them; a part of these inputs has parts of all
groups: groups of 32, padded with GAP. A weight in mxfp4 or nvfp4 is the number of its code in E2M1, times its scale,
times its factor, in fp32.

Shapes: O outputs, I inputs, of a group or of all, G groups, S scales, B bytes of a group's weights, W = B + 4.

Source: Rouhani et al. 2023, arXiv:2310.10537; OCP Microscaling Formats, version 1.0.
"""

import torch
from torch import Tensor

from llama_ssp.storage.formats import FP4_GROUP, INT4_GROUPS, INT4_ZERO_BITS, WORD_BYTES, Product

GAP = 2**16 - 1
"""The number for no input in an order of inputs, of which there are always fewer."""
_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""The borders between the numbers of neighbouring codes of E2M1."""


def join(bytes_OGB: Tensor, words_OG: Tensor) -> Tensor:
    """Join the bytes of weights and their words, numbers of 32 bits, into rows (O, G, W)."""
    return torch.cat([bytes_OGB, words_OG.contiguous()[..., None].view(torch.uint8)], dim=2)


def split(rows_OGW: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into the bytes of weights (O, G B) and the words (O, G), both copied."""
    words = rows_OGW[..., -WORD_BYTES:].contiguous().view(torch.int32)
    return rows_OGW[..., :-WORD_BYTES].flatten(1).contiguous(), words.squeeze(2)


def pack_int4(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor, order_I: Tensor | None = None) -> Tensor:
    """Pack codes (uint8), scales (fp32) and zeros (integers), and the order of the inputs, into rows (O, G, W)."""
    bytes_OGB = _pack_codes(codes_OI, scales_OG.shape[1])
    if order_I is not None:
        order_GB = order_I.to(torch.int16).view(scales_OG.shape[1], -1).view(torch.uint8)
        bytes_OGB = torch.cat([bytes_OGB, order_GB.expand(len(codes_OI), -1, -1)], dim=2)
    return join(bytes_OGB, int4_words(scales_OG, zeros_OG))


def split_int4(rows_OGW: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split rows into the bytes of codes (O, I / 2), the words (O, G), and the order (O, I) if they have one."""
    bytes_OI, words_OG = split(rows_OGW)
    bytes_OGB = bytes_OI.unflatten(1, (words_OG.shape[1], -1))
    if 2 * bytes_OGB.shape[2] in INT4_GROUPS:
        return bytes_OI, words_OG, None
    num_codes = bytes_OGB.shape[2] // 5
    order_OI = bytes_OGB[..., num_codes:].contiguous().view(torch.int16).flatten(1).int() & GAP
    return bytes_OGB[..., :num_codes].flatten(1), words_OG, order_OI


def pack_fp4(codes_OI: Tensor, scales_OS: Tensor, factors_O: Tensor) -> Tensor:
    """Pack codes and scales of floats of 4 bits, as bytes, and factors into rows (O, G, W)."""
    bytes_OGB = _pack_codes(codes_OI, num_groups := codes_OI.shape[1] // FP4_GROUP)
    bytes_OGB = torch.cat([bytes_OGB, scales_OS.unflatten(1, (num_groups, -1))], dim=2)
    return join(bytes_OGB, factors_O.float()[:, None].expand(-1, num_groups))


def split_fp4(rows_OGW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into the bytes of codes (O, I / 2), the scales (O, S), as bytes, and the factors (O,)."""
    bytes_OI, words_OG = split(rows_OGW)
    bytes_OGB, num_codes = bytes_OI.unflatten(1, (words_OG.shape[1], -1)), FP4_GROUP // 2
    codes, scales = bytes_OGB[..., :num_codes].flatten(1), bytes_OGB[..., num_codes:].flatten(1)
    return codes, scales, words_OG[:, 0].contiguous().view(torch.float32)


def _pack_codes(codes_OI: Tensor, num_groups: int) -> Tensor:
    low, high = codes_OI.unflatten(1, (num_groups, 2, -1)).unbind(2)
    bytes_OGB: Tensor = low | high << 4
    return bytes_OGB


def unpack_codes(bytes_OGB: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the first and of the last half of the inputs of each group, from its bytes."""
    return bytes_OGB & 15, bytes_OGB >> 4


def bytes_of(words: Tensor) -> Tensor:
    """The bytes of int32 words (N, M) of files, shape (N, 4 M), copied."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def codes_of_words(words: Tensor) -> Tensor:
    """The codes of int32 words (N, M) of files, shape (N, 8 M)."""
    pairs = bytes_of(words)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)


def int4_words(scales_OG: Tensor, zeros_OG: Tensor) -> Tensor:
    """The words (int32) of scales (fp32) and zeros (integers)."""
    return scales_OG.contiguous().view(torch.int32) & ~INT4_ZERO_BITS | zeros_OG.to(torch.int32)


def scales_of(words: Tensor) -> Tensor:
    """The scales (fp32) of words of int4."""
    return (words & ~INT4_ZERO_BITS).view(torch.float32)


def zeros_of(words: Tensor) -> Tensor:
    """The zeros (int32) of words of int4."""
    return words & INT4_ZERO_BITS


def dtype_of_scales(product: Product) -> torch.dtype:
    """The number format of the scales that a product reads."""
    dtype: torch.dtype = getattr(torch, product.scale_dtype)
    return dtype


def e2m1_codes_of(numbers: Tensor) -> Tensor:
    """The codes of the nearest numbers in E2M1, in bytes."""
    sizes = torch.bucketize(numbers.abs(), _BORDERS.to(numbers.device))
    return (sizes + 8 * (numbers < 0)).to(torch.uint8)

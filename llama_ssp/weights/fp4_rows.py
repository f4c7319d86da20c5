"""Weights of 4 bits that are floats, MXFP4 and NVFP4, in `byte_rows`.

    group | 16 bytes of codes, as in `int4_rows` | the scale of 32 inputs in E8M0, or two of 16 in E4M3 | its word |

A weight is the number of its code in E2M1, times its scale, times the word, in fp32, which is that of its output.

Shapes: O outputs, I inputs, G groups of 32 inputs, S scales of the inputs, B = 17 or 18 bytes of a group, W = B + 4.

Source: Rouhani et al. 2023, arXiv:2310.10537; OCP Microscaling Formats, version 1.0.
"""

import torch
from torch import Tensor

from llama_ssp.storage.formats import FP4_GROUP, Product
from llama_ssp.weights import byte_rows, int4_rows

_CODE_BYTES = FP4_GROUP // 2
_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Between the numbers of neighbouring codes."""


def pack(codes_OI: Tensor, scales_OS: Tensor, factors_O: Tensor) -> Tensor:
    """Pack codes and scales, as bytes, and factors into rows (O, G, W)."""
    bytes_OGB = int4_rows.pack_codes(codes_OI, num_groups := codes_OI.shape[1] // FP4_GROUP)
    bytes_OGB = torch.cat([bytes_OGB, scales_OS.unflatten(1, (num_groups, -1))], dim=2)
    return byte_rows.join(bytes_OGB, factors_O.float()[:, None].expand(-1, num_groups))


def split(rows_OGW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into the bytes of codes (O, I / 2), the scales (O, S), as bytes, and the factors (O,)."""
    bytes_OI, words_OG = byte_rows.split(rows_OGW)
    bytes_OGB = bytes_OI.unflatten(1, (words_OG.shape[1], -1))
    codes, scales = bytes_OGB[..., :_CODE_BYTES].flatten(1), bytes_OGB[..., _CODE_BYTES:].flatten(1)
    return codes, scales, words_OG[:, 0].contiguous().view(torch.float32)


def dtype_of_scales(product: Product) -> torch.dtype:
    """The number format of the scales that a product reads."""
    dtype: torch.dtype = getattr(torch, product.scale_dtype)
    return dtype


def codes_of(numbers: Tensor) -> Tensor:
    """The codes of the nearest numbers, in bytes."""
    sizes = torch.bucketize(numbers.abs(), _BORDERS.to(numbers.device))
    return (sizes + 8 * (numbers < 0)).to(torch.uint8)

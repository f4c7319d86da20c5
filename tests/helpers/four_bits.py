"""Rounds numbers to rows of floats of 4 bits, as tools that write such checkpoints do."""

import torch
from torch import Tensor

from llama_ssp.storage.formats import format_of
from llama_ssp.weights.byte_rows import dtype_of_scales, e2m1_codes_of, pack_fp4

_LARGEST = 6


def rounded(storage: str, weight_OI: Tensor) -> Tensor:
    """The rows of the nearest numbers.

    A scale is the power of two that leaves the largest weight below 8, or the number that makes it 6.
    """
    product = format_of(storage).product
    dtype = dtype_of_scales(product)
    tiny, factors_O = torch.finfo(torch.float32).smallest_normal, torch.ones(len(weight_OI))
    groups_OSI = weight_OI.float().unflatten(1, (-1, product.scaled))
    largest_OS = groups_OSI.abs().amax(2)
    if storage == "mxfp4":
        scales_OS = (largest_OS.frexp().exponent + 124).clamp_(0, 254).to(torch.uint8).view(dtype)
    else:
        most = torch.finfo(dtype).max
        factors_O = (largest_OS.amax(1) / (_LARGEST * most)).clamp_(min=tiny)
        scales_OS = (largest_OS / (_LARGEST * factors_O[:, None])).clamp_(max=most).to(dtype)
    steps_OS = (scales_OS.float() * factors_O[:, None]).clamp_(min=tiny)
    return pack_fp4(
        e2m1_codes_of((groups_OSI / steps_OS[..., None]).flatten(1)), scales_OS.view(torch.uint8), factors_O
    )

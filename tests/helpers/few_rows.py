"""Weights of 8 and 4 bits as the kernel of few rows takes them, whose products have exact sums.

Shapes: O outputs, I inputs.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llama_ssp.storage.formats import FP4_NUMBERS, format_of
from llama_ssp.weights import byte_rows

Operands = tuple[tuple[Tensor, ...], Tensor]
"""What the kernel takes of weights, and the weights (O, I) in fp64."""


def _powers(*shape: int) -> Tensor:
    return 2.0 ** -torch.randint(0, 6, shape)


def _int8(num_outputs: int, num_inputs: int) -> Operands:
    weight_OI = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales_O = _powers(num_outputs) / 8
    return (weight_OI, scales_O), weight_OI.double() * scales_O.double()[:, None]


def _int4(num_outputs: int, num_inputs: int, *, group: int) -> Operands:
    codes_OI = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    scales_OG = _powers(num_outputs, num_inputs // group)
    zeros_OG = torch.randint(0, 17, scales_OG.shape)
    bytes_OI, words_OG = byte_rows.split(byte_rows.pack_int4(codes_OI, scales_OG, zeros_OG))
    numbers_OGI = (codes_OI.double().unflatten(1, (-1, group)) - zeros_OG[..., None]) * scales_OG[..., None]
    return (bytes_OI, words_OG.t().contiguous()), numbers_OGI.flatten(1)


def _fp8(num_outputs: int, num_inputs: int) -> Operands:
    """All exponents: of a group the smaller or the larger half, which has a smaller scale."""
    scales_OG = _powers(num_outputs, num_inputs // 128)
    is_large_OG = torch.randint(0, 2, scales_OG.shape)
    codes_OGI = torch.randint(0, 63, (*scales_OG.shape, 128)) + 64 * is_large_OG[..., None]
    codes_OGI += 128 * torch.randint(0, 2, codes_OGI.shape)
    numbers_OGI, scales_OG = codes_OGI.to(torch.uint8).view(torch.float8_e4m3fn), scales_OG / 64**is_large_OG
    weight_OI = (numbers_OGI.double() * scales_OG[..., None]).flatten(1)
    return (numbers_OGI.flatten(1), scales_OG.t().contiguous()), weight_OI


def _fp4(num_outputs: int, num_inputs: int, *, form: str) -> Operands:
    product = format_of(form).product
    codes_OI = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    scales_OS = _powers(num_outputs, num_inputs // product.scaled).to(byte_rows.dtype_of_scales(product))
    factors_O = _powers(num_outputs) * 8
    bytes_OI, _, _ = byte_rows.split_fp4(byte_rows.pack_fp4(codes_OI, scales_OS.view(torch.uint8), factors_O))
    numbers_OSI = torch.tensor(FP4_NUMBERS).double()[codes_OI.int()].unflatten(1, (-1, product.scaled))
    numbers_OI = (numbers_OSI * scales_OS.double()[..., None]).flatten(1) * factors_O.double()[:, None]
    return (bytes_OI, scales_OS.t().contiguous(), factors_O), numbers_OI


OPERANDS: dict[str, Callable[[int, int], Operands]] = {
    "int8": _int8,
    "fp8": _fp8,
    **{f"int4, {group}": partial(_int4, group=group) for group in (128, 64, 32)},
    **{form: partial(_fp4, form=form) for form in ("mxfp4", "nvfp4")},
}
"""By form: makes operands of so many outputs and inputs."""

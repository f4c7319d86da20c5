"""On a GPU: the kernel for 8 and 4 bits computes the product, and a row's bits do not depend on other rows."""

import pytest
import torch
from torch import Tensor

from llama_ssp.storage.formats import FP4_NUMBERS, format_of, formats
from llama_ssp.weights import byte_rows
from tests.helpers.lanes import grid

pytestmark = pytest.mark.gpu(1)

SHAPES = [(4096, 4096), (4096, 11008), (1536, 4096), (128, 2048), (1000, 1408)]
GROUPS = {"int8": 0, "fp8": 128, "int4": 128, "int4, 64": 64, "int4, 32": 32, "mxfp4": 32, "nvfp4": 16}
every_case = grid(form=list(GROUPS), shape=SHAPES, dtype=[torch.float32, torch.float16, torch.bfloat16])


def operands(form: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """64 rows, what the kernel takes of the weights, and the weights in fp64."""
    generator = torch.Generator().manual_seed(sum(shape))
    x_MI = torch.randn(64, shape[1], generator=generator).to("cuda", dtype)
    if form == "int8":
        weight_OI = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8).cuda()
        scales_O = torch.rand(shape[0], generator=generator).cuda() / 4096
        return x_MI, (weight_OI, scales_O), weight_OI.double() * scales_O.double()[:, None]
    group = GROUPS[form]
    if form == "fp8":
        numbers_OI = torch.randn(shape, generator=generator).mul_(64).to(torch.float8_e4m3fn)
        scales_OG = torch.rand(shape[0], shape[1] // group, generator=generator) / 4096
        numbers = numbers_OI.double().unflatten(1, (-1, group)) * scales_OG.double()[..., None]
        return x_MI, (numbers_OI.cuda(), scales_OG.t().contiguous().cuda()), numbers.flatten(1).cuda()
    codes_OI = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    if form in formats():
        scales_OS = torch.rand(shape[0], shape[1] // group, generator=generator).to(
            byte_rows.dtype_of_scales(format_of(form).product)
        )
        factors_O = torch.rand(shape[0], generator=generator) / 64
        codes, _, _ = byte_rows.split_fp4(byte_rows.pack_fp4(codes_OI, scales_OS.view(torch.uint8), factors_O))
        numbers = torch.tensor(FP4_NUMBERS).double()[codes_OI.int()].unflatten(1, (-1, group))
        numbers = (numbers * scales_OS.double()[..., None]).flatten(1) * factors_O.double()[:, None]
        return x_MI, (codes.cuda(), scales_OS.t().contiguous().cuda(), factors_O.cuda()), numbers.cuda()
    scales_OG = torch.rand(shape[0], shape[1] // group, generator=generator).half().float() / 64
    zeros_OG = torch.randint(0, 17, scales_OG.shape, generator=generator)
    numbers = (codes_OI.double().unflatten(1, (-1, group)) - zeros_OG[..., None]) * scales_OG.double()[..., None]
    codes, words = byte_rows.split(byte_rows.pack_int4(codes_OI, scales_OG, zeros_OG))
    return x_MI, (codes.cuda(), words.t().contiguous().cuda()), numbers.flatten(1).cuda()


@every_case
def test_products_are_those_of_the_numbers(form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from llama_ssp.kernels.linear_gpu import product_of_few_rows

    x_MI, weights, numbers_OI = operands(form, shape, dtype)
    wanted = x_MI.double() @ numbers_OI.t()
    found = product_of_few_rows(x_MI, *weights)
    assert found.dtype is dtype
    # A tensor core may cut off its sums in fp32; the rounding of 16-bit results is far larger.
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@every_case
def test_a_row_has_the_same_bits_alone_and_among_others(form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from llama_ssp.kernels.linear_gpu import product_of_few_rows

    x_MI, weights, _ = operands(form, shape, dtype)
    whole_MO = product_of_few_rows(x_MI, *weights)
    for num_rows in (1, 5, 8, 9, 16, 17, 33):
        assert torch.equal(product_of_few_rows(x_MI[:num_rows], *weights), whole_MO[:num_rows]), num_rows


@grid(form=list(GROUPS), shape=[(8 * 1536, 4096), (128 * 48, 768)], dtype=[torch.float16, torch.bfloat16])
def test_pairs_of_experts_have_the_products_of_their_matrices_whatever_others_choose(
    form: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    from llama_ssp.kernels.linear_gpu import choose, product_of_few_rows

    x_MI, weights, numbers_OI = operands(form, shape, dtype)
    num_experts = 8 if shape[1] > 768 else 128
    weights_XOI = numbers_OI.unflatten(0, (num_experts, -1))
    ids_MK = torch.rand(64, num_experts + 1, device="cuda").topk(2).indices  # the last one is elsewhere
    found_MKO = [
        product_of_few_rows(x_MI[:n], *weights, chosen=choose(ids_MK[:n], num_experts, value_bytes=2)).view(n, 2, -1)
        for n in (1, 5, 64)
    ]
    assert torch.equal(found_MKO[0], found_MKO[2][:1])
    assert torch.equal(found_MKO[1], found_MKO[2][:5])
    for row, (x_I, ids_K) in enumerate(zip(x_MI.double(), ids_MK.tolist(), strict=True)):
        for pair, expert in enumerate(ids_K):
            wanted_O = weights_XOI[expert] @ x_I if expert < num_experts else 0 * (weights_XOI[0] @ x_I)
            error = (found_MKO[2][row, pair] - wanted_O).abs().max()
            assert error <= torch.finfo(dtype).eps * wanted_O.abs().max()

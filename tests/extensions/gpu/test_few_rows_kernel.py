"""On a GPU: the kernel for 8 and 4 bits computes the product, and a row's bits do not depend on other rows."""

import pytest
import torch
from torch import Tensor

from tests.helpers.few_rows import OPERANDS
from tests.helpers.lanes import grid

pytestmark = pytest.mark.gpu(1)

SHAPES = [(4096, 4096), (4096, 11008), (1536, 4096), (128, 2048), (1000, 1408)]
every_case = grid(form=list(OPERANDS), shape=SHAPES, dtype=[torch.float32, torch.float16, torch.bfloat16])


def operands(form: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor]:
    """64 rows, what the kernel takes of the weights, and the weights in fp64."""
    torch.manual_seed(sum(shape))
    weights, numbers_OI = OPERANDS[form](*shape)
    return torch.randn(64, shape[1]).to("cuda", dtype), [part.cuda() for part in weights], numbers_OI.cuda()


@every_case
def test_products_are_those_of_the_numbers(form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from llama_ssp.extensions.gpu.kernels.linear import product_of_few_rows

    x_MI, weights, numbers_OI = operands(form, shape, dtype)
    wanted = x_MI.double() @ numbers_OI.t()
    found = product_of_few_rows(x_MI, *weights)
    assert found.dtype is dtype
    # A tensor core may cut off its sums in fp32; the rounding of 16-bit results is far larger.
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@every_case
def test_a_row_has_the_same_bits_alone_and_among_others(form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from llama_ssp.extensions.gpu.kernels.linear import product_of_few_rows

    x_MI, weights, _ = operands(form, shape, dtype)
    whole_MO = product_of_few_rows(x_MI, *weights)
    for num_rows in (1, 5, 8, 9, 16, 17, 33):
        assert torch.equal(product_of_few_rows(x_MI[:num_rows], *weights), whole_MO[:num_rows]), num_rows


@grid(form=list(OPERANDS), shape=[(8 * 1536, 4096), (128 * 48, 768)], dtype=[torch.float16, torch.bfloat16])
def test_pairs_of_experts_have_the_products_of_their_matrices_whatever_others_choose(
    form: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    from llama_ssp.extensions.gpu.kernels.linear import choose, product_of_few_rows

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

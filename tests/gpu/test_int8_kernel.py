"""On a GPU: the int8 kernel computes the product, and the bits of a row do not depend on the rows next to it."""

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu(1)

SHAPES = [(4096, 4096), (4096, 11008), (1536, 4096), (128, 2048), (1000, 1376)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def operands(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """64 rows, bytes and scales."""
    generator = torch.Generator().manual_seed(sum(shape))
    x_MI = torch.randn(64, shape[1], generator=generator).to("cuda", dtype)
    weight_OI = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8).cuda()
    return x_MI, weight_OI, torch.rand(shape[0], generator=generator).to("cuda", dtype) / 4096


@every_dtype
@every_shape
def test_products_are_those_of_the_bytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from llama_ssp.models.quantization.int8_kernel import product_of_few_rows

    x_MI, weight_OI, scales_O = operands(shape, dtype)
    wanted = (x_MI.double() @ weight_OI.double().t()) * scales_O.double()
    found = product_of_few_rows(x_MI, weight_OI, scales_O)
    assert found.dtype is dtype
    # A tensor core may cut off its sums in fp32; the rounding of 16-bit results is far larger.
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@every_dtype
@every_shape
def test_a_row_has_the_same_bits_alone_and_among_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from llama_ssp.models.quantization.int8_kernel import product_of_few_rows

    x_MI, weight_OI, scales_O = operands(shape, dtype)
    whole_MO = product_of_few_rows(x_MI, weight_OI, scales_O)
    for num_rows in (1, 5, 8, 9, 16, 17, 33):
        assert torch.equal(product_of_few_rows(x_MI[:num_rows], weight_OI, scales_O), whole_MO[:num_rows]), num_rows

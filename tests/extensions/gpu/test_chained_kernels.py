"""On a GPU: our products of 16-bit weights are right, and captured kernels of ours need not wait for the last one."""

import ctypes

import pytest
import torch

from llama_ssp.kernels.attention_by_length import capability_of

pytestmark = pytest.mark.gpu(1)
SHAPES = [(4096, 4096), (2048, 5632), (576, 1536), (1000, 1104), (128, 8192)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_product_and_from_2_rows_on_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from llama_ssp.extensions.gpu.kernels.halves import product_of_halves

    generator = torch.Generator().manual_seed(0)
    weight_OI, x_MI = (torch.randn(size, shape[1], generator=generator).to("cuda", dtype) for size in (shape[0], 16))
    for fewest, most in ((1, 1), (2, 16)):
        found_MO = product_of_halves(x_MI[:most], weight_OI)
        wanted_MO = x_MI[:most].double() @ weight_OI.double().t()
        assert (found_MO - wanted_MO).abs().max() < torch.finfo(dtype).eps * wanted_MO.abs().max()
        for num_rows in range(fewest, most):
            assert torch.equal(product_of_halves(x_MI[:num_rows].clone(), weight_OI), found_MO[:num_rows]), num_rows


def test_a_captured_kernel_may_start_while_the_one_before_it_ends() -> None:
    if capability_of(torch.device("cuda")) < 9:
        pytest.skip("there is no programmatic dependent launch")
    from llama_ssp.extensions.gpu.kernels.between import add_norm, gated
    from llama_ssp.extensions.gpu.kernels.halves import product_of_halves

    x_ME, weight_OE = torch.ones(2, 512, 512, dtype=torch.float16, device="cuda")
    norm_E = torch.ones_like(x_ME[0])
    for num_rows in (1, 16):

        def layer(num_rows: int = num_rows) -> torch.Tensor:
            return gated(product_of_halves(add_norm(x_ME[:num_rows], None, norm_E, 1e-6), weight_OE))

        layer()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            layer()
        assert kinds_of_edges(graph) == [1, 1]


def kinds_of_edges(graph: torch.cuda.CUDAGraph) -> list[int]:
    """The types of a captured graph's edges: 1 is programmatic."""
    driver, number, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_void_p(graph.raw_cuda_graph())
    assert driver.cuGraphGetEdges_v2(raw, None, None, None, ctypes.byref(number)) == 0
    starts, ends, edges = (ctypes.create_string_buffer(8 * number.value) for _ in range(3))
    assert driver.cuGraphGetEdges_v2(raw, starts, ends, edges, ctypes.byref(number)) == 0
    return [edge[2] for edge in (edges.raw[at : at + 8] for at in range(0, 8 * number.value, 8))]

"""Elementwise parts of a layer compute the same compiled, and go on where nothing can be compiled."""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch.nn import functional

from llama_ssp.models.llama import fused
from llama_ssp.models.llama.fused import Fused

pytestmark = pytest.mark.seconds

graph_of = partial(torch.compile, backend="eager", fullgraph=True)
"""What a compiler makes of a function before it generates code: it must be one graph."""


def test_the_gate_is_one_graph() -> None:
    gate_up_M2U = torch.randn(5, 12)
    found = Fused(fused._gated, compiler=graph_of, device="cpu")(gate_up_M2U)
    torch.testing.assert_close(found, functional.silu(gate_up_M2U[:, :6]) * gate_up_M2U[:, 6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pairs_are_turned_as_complex_numbers_are(dtype: torch.dtype) -> None:
    whole_MXD = torch.randn(5, 4, 8, dtype=dtype)
    freqs_cis_M1P = torch.polar(torch.full((5, 1, 4), 1.5), torch.randn(5, 1, 4))
    turned = torch.view_as_complex(whole_MXD[:, :3].float().unflatten(-1, (-1, 2))) * freqs_cis_M1P
    wanted = torch.cat([torch.view_as_real(turned).flatten(-2).to(dtype), whole_MXD[:, 3:]], dim=1)
    found = Fused(fused._turn_pairs, compiler=graph_of, device="cpu")(whole_MXD, torch.view_as_real(freqs_cis_M1P), 3)
    torch.testing.assert_close(found, wanted)


def test_every_variant_of_shapes_and_formats_is_compiled() -> None:
    calls = 0

    def counting(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        def called(*inputs: Any) -> Any:  # noqa: ANN401 - a graph's
            nonlocal calls
            calls += 1
            return graph(*inputs)

        return called

    part = Fused(fused._turn_pairs, compiler=partial(torch.compile, backend=counting, dynamic=False), device="cpu")
    variants = [
        (dtype, rows, size) for dtype in (torch.float32, torch.float16) for rows in (1, 5, 9) for size in (4, 8)
    ]
    for dtype, rows, size in variants:
        part(torch.randn(rows, 3, size, dtype=dtype), torch.randn(rows, 1, size // 2, 2), 2)
    assert part.is_compiled
    assert calls == len(variants)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="nothing is compiled here without g++")
def test_rotary_and_gate_are_one_kernel_each() -> None:
    heads_MXD, turns_M1P2 = torch.randn(5, 6, 16, dtype=torch.float16), torch.randn(5, 1, 8, 2)
    for function, arguments in ((fused._turn_pairs, (heads_MXD, turns_M1P2, 4)), (fused._gated, (torch.randn(5, 64),))):
        metrics.reset()
        found = Fused(function, device="cpu")(*arguments)
        torch.testing.assert_close(found, function(*arguments))
        assert metrics.generated_kernel_count == 1


def test_what_cannot_be_compiled_is_called_as_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    def no_code(_graph: object, _inputs: object) -> Callable[..., Tensor]:
        raise ImportError("there is no Triton here\nTraceback")

    calls = 0

    def double(values: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return values * 2

    broken = Fused(double, compiler=partial(torch.compile, backend=no_code), device="cpu")
    with caplog.at_level(logging.WARNING):
        assert [broken(torch.tensor([float(number)])).item() for number in range(3)] == [0, 2, 4]
    (record,) = caplog.records
    assert "continuing without compiled kernels" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not broken.is_compiled


def test_nothing_is_compiled_for_another_device() -> None:
    def compiler(_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        raise AssertionError("compiled")

    part = Fused(lambda values: values + 1, compiler=compiler)
    assert part(torch.zeros(1)).item() == 1
    assert not part.is_compiled

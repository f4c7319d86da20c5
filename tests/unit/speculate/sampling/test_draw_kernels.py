"""The kernels of a draw without a GPU; `tests.helpers.interpreted_kernels` computes their values."""

import logging

import pytest
import torch

from llama_ssp.speculate.sampling import processors
from tests.helpers.ahead_of_time import CAPABILITIES, compile_kernel
from tests.helpers.lanes import grid


@pytest.mark.triton
@pytest.mark.seconds
@grid(capability=CAPABILITIES, vocab_size=[32_000, 128_256])
def test_the_kernels_compile_without_a_stack(capability: int, vocab_size: int) -> None:
    from llama_ssp.kernels import draw_gpu

    tokens = processors.tokens_of_a_block(vocab_size)
    types = {"weights": "*fp32", "sums": "*i64", "uniforms": "*fp64", "ids": "*i64", "units": "fp32"}
    types |= dict.fromkeys(("vocab_size", "num_blocks", "uniforms_stride"), "i32")
    blocks = 1 << (-(-vocab_size // tokens) - 1).bit_length()
    for kernel, num_warps, constants in (
        (draw_gpu.sum_blocks, 1, {"TOKENS": tokens}),
        (draw_gpu.pick_token, 4, {"TOKENS": tokens, "BLOCKS": blocks}),
    ):
        found = compile_kernel(
            kernel, types, constants, capability=capability, num_warps=num_warps, uneven=["uniforms", "num_blocks"]
        )
        assert found.stack_bytes == 0


def test_where_the_kernels_do_not_work_torch_s_operators_draw_and_one_sentence_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(*_arguments: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("no compiler\nTraceback")

    monkeypatch.setattr(torch.Tensor, "cuda", no_device)
    processors._fused_draw.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert processors._fused_draw() is None
        assert processors._fused_draw() is None
    processors._fused_draw.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("continuing with draws of twenty kernels instead of two")
    assert "\n" not in record.getMessage()


def test_nothing_is_tried_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried() -> None:
        raise AssertionError

    monkeypatch.setattr(processors, "_fused_draw", tried)
    assert processors.draw(torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(1, 2, dtype=torch.float64)).item() == 1

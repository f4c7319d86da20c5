"""The kernels of a draw without a GPU; `interpreted_kernels` computes their values."""

import logging

import pytest
import torch

from llama_ssp.extensions.gpu import draw
from llama_ssp.speculate.sampling import processors


def test_where_the_kernels_do_not_work_torch_s_operators_draw_and_one_sentence_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(*_arguments: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("no compiler\nTraceback")

    monkeypatch.setattr(torch.Tensor, "cuda", no_device)
    draw.tried_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert draw.tried_kernels() is None
        assert draw.tried_kernels() is None
    draw.tried_kernels.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("continuing with draws of twenty kernels instead of two")
    assert "\n" not in record.getMessage()


def test_nothing_is_tried_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried() -> None:
        raise AssertionError

    monkeypatch.setattr(draw, "tried_kernels", tried)
    assert processors.draw(torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(1, 2, dtype=torch.float64)).item() == 1

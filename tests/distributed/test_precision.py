"""Quantized targets over gloo ranks, loaded as a run loads them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.formats import formats
from llama_ssp.weights.checkpoint import inspect
from tests.distributed.ranks import QUANTIZED, QUANTIZED_RANKS

Seen = list[dict[str, Any]]


@cache
def alone(folder: Path, form: str) -> Tensor:
    """Logits (T, V) of the same model in this process."""
    runner = load_model(
        inspect(folder), dtype=torch.float32, device=torch.device("cpu"), comm=Comm.single(),
        precision=Precision(quantization=form),
    )  # fmt: skip
    runner.allocate(batch_size=1, capacity=16)
    return runner.forward(torch.arange(20, 32)[None], torch.arange(12)[None], bucket=16)[0]


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.distributed(QUANTIZED_RANKS)
@pytest.mark.parametrize("form", formats())
@pytest.mark.parametrize("family", QUANTIZED)
def test_logits_come_within_the_error_of_the_same_precision_on_one_process(
    family: str, form: str, pairs: Path, launched: Callable[[int], Seen]
) -> None:
    exact, quantized = (alone(pairs / "wide" / family, precision) for precision in ("none", form))
    error = rms(quantized - exact) if form != "none" else 1e-5
    for seen in launched(QUANTIZED_RANKS):
        assert rms(torch.tensor(seen[f"{family} in {form}"]) - quantized) <= error

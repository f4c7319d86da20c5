"""Holds the runner to the library's own logits, however rows are laid out, and to reading no value inside a forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llama_ssp.extensions.modules.building import load_modules
from llama_ssp.extensions.modules.families import adapt
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.models import VOCAB_SIZE, library_logits, tiny_model
from tests.unit.models.conftest import Saved
from tests.unit.models.llama.test_decoder import Library, ragged_rounds, random_ids

SavedModels = Callable[[str], Saved]
FAMILIES = (
    "llama",
    "gpt_neox",
    "qwen2",
    "qwen3",
    "phi",
    "gemma",
    "gpt2",
    "mistral",
    "qwen2, windows",
    "qwen3, windows",
    "gemma2",
    "gemma3_text",
    "gpt_neo",
)
# Largest difference of fp32 logits of size 3 between two orders of the same sums.
TOLERANCE = 2e-5


def runner_of(saved: SavedModels, family: str, *, batch_size: int, capacity: int = 40) -> ModuleRunner:
    folder, _ = saved(family)
    modules = load_modules(Loading(inspect(folder)))
    runner = ModuleRunner(modules, comm=Comm.single())
    runner.allocate(batch_size=batch_size, capacity=capacity)
    return runner


@pytest.mark.seconds
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_get_the_logits_that_each_gets_alone(saved: SavedModels, family: str) -> None:
    """Rows of different lengths, rows that are taken back, and new rows among old ones."""
    runner = runner_of(saved, family, batch_size=3)
    for found, wanted in zip(ragged_rounds(runner), ragged_rounds(Library(saved(family)[1])), strict=True):
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def test_only_the_wanted_rows_reach_the_output_head(saved: SavedModels) -> None:
    runner = runner_of(saved, "llama", batch_size=2)
    widths: list[int] = []
    head: Any = runner._model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _module, args: widths.append(args[0].shape[1]))
    for scored in (None, torch.tensor([[8, 0], [3, 3]])):
        runner.forward(random_ids(2, 9), torch.arange(9).expand(2, -1), bucket=16, score_positions_BR=scored)
    assert widths == [9, 2]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "gemma3_text", "gpt_neo"])
def test_a_forward_reads_no_value(family: str) -> None:
    """A meta tensor has no values: whatever reads one raises."""
    model = tiny_model(family)
    adapt(model)
    torch.nn.Module.to(model, "meta")
    runner = ModuleRunner(model, comm=Comm.single())
    runner.allocate(batch_size=2, capacity=32)
    ids_BT = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    rows_B = torch.zeros(2, dtype=torch.int64, device="meta")
    logits = runner.forward(ids_BT, ids_BT, bucket=16, score_positions_BR=ids_BT[:, :2], cache_rows_B=rows_B)
    assert logits.shape == (2, 2, VOCAB_SIZE)
    assert logits.device.type == "meta"


def test_a_cache_that_was_filled_in_inference_mode_can_be_used_outside(saved: SavedModels) -> None:
    runner = runner_of(saved, "llama", batch_size=1)
    ids_BT = random_ids(1, 8)
    with torch.inference_mode():
        runner.allocate(batch_size=1, capacity=64)
        runner.forward(ids_BT[:, :6], torch.arange(6)[None], bucket=16)
    logits = runner.forward(ids_BT[:, 6:], torch.arange(6, 8)[None], bucket=16)
    torch.testing.assert_close(logits[0], library_logits(saved("llama")[1], ids_BT[0])[-2:], atol=TOLERANCE, rtol=0)

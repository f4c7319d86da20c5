"""Holds the runner to the library's own logits, however rows are laid out, and to reading no value inside a forward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llama_ssp.models.huggingface.families import adapt
from llama_ssp.models.huggingface.modules import load_modules
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.models import VOCAB_SIZE, library_logits, tiny_model
from tests.unit.models.conftest import Saved

SavedModels = Callable[[str], Saved]
FAMILIES = (
    "llama", "gpt_neox", "qwen2", "qwen3", "phi", "gemma", "gpt2", "mistral", "qwen2, windows", "qwen3, windows",
    "gemma2", "gemma3_text", "gpt_neo",
)  # fmt: skip
# Largest difference of fp32 logits of size 3 between two orders of the same sums.
TOLERANCE = 2e-5


def runner_of(saved: SavedModels, family: str, *, batch_size: int, capacity: int = 40) -> ModuleRunner:
    folder, _ = saved(family)
    modules = load_modules(Loading(inspect(folder)))
    runner = ModuleRunner(modules, comm=Comm.single())
    runner.allocate(batch_size=batch_size, capacity=capacity)
    return runner


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_get_the_logits_that_each_gets_alone(saved: SavedModels, family: str) -> None:
    runner = runner_of(saved, family, batch_size=3)
    ids_BT, lengths_B1 = random_ids(3, 16), torch.tensor([[4], [11], [7]])
    runner.forward(ids_BT[:, :11], torch.arange(11).expand(3, -1), bucket=16)
    steps_B3 = lengths_B1 + torch.arange(3)
    logits_B3V = runner.forward(ids_BT.gather(1, steps_B3), steps_B3, bucket=24)
    for row, length in enumerate(lengths_B1[:, 0].tolist()):
        wanted = library_logits(saved(family)[1], ids_BT[row, : length + 3])
        assert_close(logits_B3V[row], wanted[length:])


@pytest.mark.parametrize("family", FAMILIES)
def test_writing_at_smaller_positions_rolls_a_row_back(saved: SavedModels, family: str) -> None:
    runner = runner_of(saved, family, batch_size=2)
    ids_BT = random_ids(2, 12)
    wrong_BT = (ids_BT + 1) % VOCAB_SIZE
    runner.forward(ids_BT[:, :8], torch.arange(8).expand(2, -1), bucket=16)
    runner.forward(wrong_BT[:, 8:], torch.arange(8, 12).expand(2, -1), bucket=16)
    # The first row keeps two of its drafted tokens' slots, the second none.
    again_BT = torch.tensor([[7, 8, 9], [5, 6, 7]])
    logits_BTV = runner.forward(ids_BT.gather(1, again_BT), again_BT, bucket=16)
    for row in range(2):
        wanted = library_logits(saved(family)[1], ids_BT[row, : int(again_BT[row, -1]) + 1])
        assert_close(logits_BTV[row], wanted[again_BT[row]])


def test_a_prefill_of_some_rows_leaves_the_others_alone(saved: SavedModels) -> None:
    runner = runner_of(saved, "llama", batch_size=4)
    ids_BT = random_ids(4, 10)
    runner.forward(ids_BT[:, :6], torch.arange(6).expand(4, -1), bucket=16)
    new_RT = (ids_BT[:2] + 3) % VOCAB_SIZE
    logits_RTV = runner.forward(
        new_RT[:, :8], torch.arange(8).expand(2, -1), bucket=8, cache_rows_B=torch.tensor([3, 1])
    )
    assert_close(logits_RTV[0], library_logits(saved("llama")[1], new_RT[0, :8]))
    replaced = {1: new_RT[1, :8], 3: new_RT[0, :8]}
    texts = [torch.cat([replaced[row], ids_BT[row, 8:9]]) if row in replaced else ids_BT[row, :7] for row in range(4)]
    last_B1 = torch.tensor([[6], [8], [6], [8]])
    logits_B1V = runner.forward(ids_BT.gather(1, last_B1), last_B1, bucket=16)
    for row, text in enumerate(texts):
        assert_close(logits_B1V[row], library_logits(saved("llama")[1], text)[-1:])


def test_only_the_wanted_rows_reach_the_output_head(saved: SavedModels) -> None:
    runner = runner_of(saved, "llama", batch_size=2)
    ids_BT, score_positions_BR = random_ids(2, 9), torch.tensor([[8, 0], [3, 3]])
    positions_BT = torch.arange(9).expand(2, -1)
    widths: list[int] = []
    head = saved_head(runner)
    head.register_forward_pre_hook(lambda _module, args: widths.append(args[0].shape[1]))
    all_BTV = runner.forward(ids_BT, positions_BT, bucket=16)
    some_BRV = runner.forward(ids_BT, positions_BT, bucket=16, score_positions_BR=score_positions_BR)
    assert widths == [9, 2]
    assert_close(some_BRV, all_BTV.gather(1, score_positions_BR[..., None].expand(-1, -1, VOCAB_SIZE)))


def saved_head(runner: ModuleRunner) -> torch.nn.Module:
    head: torch.nn.Module = runner._model.get_output_embeddings()
    return head


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
    assert_close(logits[0], library_logits(saved("llama")[1], ids_BT[0])[-2:])

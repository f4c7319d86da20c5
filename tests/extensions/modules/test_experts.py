"""Quantized experts as a GPU has them: rounds read no value on the host, however many rows they have."""

from typing import Any

import pytest
import torch

from llama_ssp.extensions.modules.experts import OwnExperts
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.weights import Loading
from llama_ssp.storage.formats import FEW_ROWS
from llama_ssp.weights.in_memory import weights_of
from tests.helpers.joined_experts import join_on_cpu
from tests.helpers.models import tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 16, "vocab_size": 224}


@pytest.fixture
def num_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each choice of experts has."""
    return join_on_cpu(monkeypatch)


@pytest.fixture(params=["mixtral", "gpt_oss"])
def runner(request: pytest.FixtureRequest, num_tokens: list[int]) -> Any:
    """A tiny model with quantized experts, with and without biases."""
    origin = weights_of(tiny_model(request.param, **SIZES), what="model")
    loaded = load_model(Loading(origin, dtype=torch.float32, precision=Precision(quantization="int8_weight_only")))
    num_tokens.clear()
    return loaded


@pytest.mark.parametrize("batch_size", [1, 32, 33, 80])
def test_a_round_of_any_size_goes_through_the_kernel_in_pieces(
    runner: Any,
    num_tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
) -> None:
    ids_BT = torch.randint(224, (batch_size, 4), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.arange(4).expand(batch_size, -1)

    def scored() -> torch.Tensor:
        runner.allocate(batch_size=batch_size, capacity=16)
        found: torch.Tensor = runner.forward(ids_BT, positions_BT, bucket=16)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(OwnExperts, "_one_by_one", None)  # which reads a value
        found_BTV = scored()
    num_layers = runner._model.config.num_hidden_layers
    assert num_tokens == [*map(len, torch.arange(4 * batch_size).split(FEW_ROWS))] * num_layers
    for experts in runner._experts:
        experts._of_few = None
    torch.testing.assert_close(found_BTV, scored(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [FEW_ROWS, FEW_ROWS + 1])
def test_long_prompts_are_read_expert_by_expert(runner: Any, num_tokens: list[int], length: int) -> None:
    runner.allocate(batch_size=1, capacity=136)
    row = {"bucket": 136, "cache_rows_B": torch.zeros(1, dtype=torch.int64)}
    last_11, prompt_1T = torch.full((1, 1), length - 1), torch.arange(length)[None]
    runner.forward(prompt_1T, prompt_1T, score_positions_BR=last_11, **row)
    assert bool(num_tokens) is (length <= FEW_ROWS)
    runner.forward(prompt_1T, prompt_1T, **row)
    assert num_tokens, "a round of some rows, which scores all tokens, reads no value on the host"
    num_tokens.clear()
    runner.forward(torch.arange(3)[None], torch.arange(3)[None], bucket=136)
    assert num_tokens == [3] * runner._model.config.num_hidden_layers

"""Holds the check before loading to finding what loading would find."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.errors import ConfigError, PlacementError, SspError
from llama_ssp.models.huggingface.modules import build_empty
from llama_ssp.models.loading import check_model
from llama_ssp.weights.checkpoint import Checkpoint, inspect
from tests.helpers.models import build_checkpoint
from tests.unit.models.conftest import Saved

pytestmark = pytest.mark.seconds


def test_a_sound_checkpoint_passes_without_a_read(
    saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_args, **_kwargs: pytest.fail("a tensor was read"))
    check_model(inspect(saved("llama")[0]), num_ranks=3)


def test_an_empty_model_has_no_weights_but_real_buffers(saved: Callable[[str], Saved]) -> None:
    model = build_empty(inspect(saved("llama")[0]))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert model.config._attn_implementation == "sdpa"


def test_too_many_ranks_are_found(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(PlacementError, match="at most 8 ranks"):
        check_model(inspect(saved("llama")[0]), num_ranks=9)


@pytest.mark.parametrize(
    ("family", "sizes", "error", "reason"),
    [
        ("gpt_neox", {"sliding_window": 64}, ConfigError, "supported for .*gpt_neo, .*mistral, .*qwen2"),
        ("llama", {"is_causal": False}, ConfigError, "attends in both directions"),
        ("llama", {"num_key_value_heads": 3}, PlacementError, "8 query heads over 3"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, ConfigError, "layers of kind conv"),
    ],
)
def test_models_that_cannot_be_served_are_found_for_one_rank_too(
    tmp_path: Path, family: str, sizes: dict[str, Any], error: type[SspError], reason: str
) -> None:
    build_checkpoint(tmp_path, family, **sizes)
    with pytest.raises(error, match=reason):
        check_model(inspect(tmp_path), num_ranks=1)

"""Kinds of models without the library that runs them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_ssp import architectures, manifest
from llama_ssp.architectures import family
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.errors import ConfigError
from llama_ssp.registry import Registry
from llama_ssp.weights.checkpoint import inspect

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 200,
}


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core without any extension."""
    monkeypatch.setattr(manifest, "present", lambda: ())
    modules = (architectures.__name__,)
    of_core: Registry[family.Family] = Registry(setting="model_type", modules=modules, kind=family.Family)
    monkeypatch.setattr(family, "FAMILIES", of_core)
    monkeypatch.setattr(family, "LIBRARIES", Registry(setting="model_type", kind=family.ModelLibrary))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", ["mixtral", "gemma2", "bamba", "xglm"])
@pytest.mark.parametrize(
    "door",
    [read_config, lambda folder: check_readable(folder, "none"), lambda folder: inspect(folder, config_alone=True)],
)
def test_kinds_that_only_a_library_runs_are_refused_by_the_name_of_its_extension(
    kind: str, door: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **SIZES}))
    with pytest.raises(ConfigError, match=f"^model_type={kind} needs the modules extension, which"):
        door(tmp_path)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_kinds_of_the_lean_decoder_need_no_library(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **SIZES}))
    shape, _ = read_config(tmp_path)
    assert shape.modules is None
    assert not shape.refusal
    assert family.inventory(shape).num_layers == 2

"""Folders and ids of adapters: found, named where a model is meant, compared when a run is resumed, and refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.extensions.adapters.records import CONFIG, WEIGHTS
from llama_ssp.run.checkpoints import find_update
from llama_ssp.settings.extensions import whole
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.adapters import round_weights, save_adapter, save_merged
from tests.helpers.doors import save_models
from tests.helpers.edits import edit_tensors
from tests.helpers.extensions import need
from tests.helpers.hub import shipped
from tests.helpers.in_process import launch

ALONE = '{"base_model_name_or_path": "acme/base"}'


def adapted(adapter: str | None) -> ModelConfig:
    entry: ModelConfig = whole(ModelConfig)(name="7B", hub_id="owner/llama-7b", adapter=adapter)
    return entry


def folders_of(adapter: str | None) -> list[Path]:
    return [folder for _, folder in hub.resolve_changes(adapted(adapter))]


def test_an_adapter_may_be_an_id_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, object] = {}

    def download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert folders_of("acme/lora") == [tmp_path]
    assert asked == {"repo_id": "acme/lora", "allow_patterns": [CONFIG, WEIGHTS]}
    for adapter, found in ((None, []), (str(tmp_path), [tmp_path]), ("./nothing/here", [Path("nothing/here")])):
        assert folders_of(adapter) == found
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="acme/lora on the hub is not in "):
        folders_of("acme/lora")
    (tmp_path / CONFIG).write_text(ALONE)
    monkeypatch.setattr(hub, "snapshot_download", download)
    for find in (hub.resolve, hub.find_config):
        with pytest.raises(CheckpointError, match='llama-7b on the hub is an adapter of "acme/base", not a model'):
            find(adapted(None))


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_in_place_of_a_model_is_named_by_runs_and_plans(tmp_path: Path, *, has_config: bool) -> None:
    (tmp_path / CONFIG).write_text(ALONE)
    if has_config:
        shutil.copy(shipped("tiny") / "config.json", tmp_path)
    of_plans: list[Any] = [read_config, lambda folder: check_readable(folder, "none")]
    for read in [inspect, *([] if has_config else of_plans)]:
        with pytest.raises(CheckpointError, match=f'^{tmp_path} is an adapter of "acme/base", not a model: give that'):
            read(tmp_path)


@pytest.mark.heavy
def test_an_adapter_writes_what_the_merged_model_writes_and_is_compared_when_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny-draft"):
        folder = Path(shutil.copytree(shipped(name), name))
        round_weights(folder)
        save_adapter(Path(f"adapter-{name}"), folder)
        save_merged(Path(f"merged-{name}"), folder, Path(f"adapter-{name}"))
    every = ("task=generate", "max_new_tokens=4", "prompt=import")
    of_merged = launch(*every, "model=./merged-tiny", "draft=./merged-tiny-draft", "run_dir=merged").well()
    adapters = ("model.adapter=adapter-tiny", "draft.model.adapter=adapter-tiny-draft", "run_dir=adapted")
    words = (*every, "model=./tiny", "draft=./tiny-draft")
    found, plain = launch(*words, *adapters).well(), launch(*words, "run_dir=plain").well()
    texts = [[(line["text"], line["accepted_lengths"]) for line in each.lines] for each in (found, of_merged, plain)]
    assert texts[0] == texts[1] != texts[2]
    edit_tensors(Path("adapter-tiny") / WEIGHTS, lambda of: of.update({name: -of[name] for name in of}))
    assert f"({WEIGHTS} of model=local differs)" in launch(*words, *adapters).err


def test_an_adapter_has_no_effect_with_synthetic_weights_and_is_found_by_other_names() -> None:
    ended = launch("weights=synthetic", "draft.model.adapter=DIR", "prompt=x")
    assert "draft.model.adapter has no effect with weights=synthetic, which reads no files" in ended.err
    assert "model.adapter=DIR merges a LoRA adapter" in launch("lora=x").err


def test_an_update_brings_no_adapter_under_mtp_layers(tmp_path: Path) -> None:
    need("heads")
    folders = save_models(tmp_path)
    mtp = load(folders["mtp"], "mtp")
    entry = replace(adapted(str(folders["hybrid"])), hub_id=None, path=str(folders["mtp"]))
    with pytest.raises(ConfigError, match=r"reads the files of the target without model\.adapter="):
        find_update(mtp.config, mtp.world, mtp.models.sources, [entry, None])

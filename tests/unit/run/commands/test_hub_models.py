"""Models of the hub by their ids: found in a cache, without a network, by runs, plans, sweeps and the library."""

import json
from pathlib import Path

import pytest

from tests.helpers.extensions import need
from tests.helpers.hub import put, shipped
from tests.helpers.in_process import Ended, launch, planned

pytestmark = pytest.mark.usefixtures("cache")

TARGET, DRAFT = "acme/tiny-v1.0", "acme/tiny_draft"
PAIR = (f"model={TARGET}", f"draft={DRAFT}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the shipped pair under ids of the hub."""
    folder = tmp_path / "hub"
    for hub_id, name in ((TARGET, "tiny"), (DRAFT, "tiny-draft")):
        put(folder, hub_id, shipped(name).iterdir())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def run(folder: Path, *words: str) -> Ended:
    return launch(*words, "task=generate", "device=cpu", "prompt=import os", "max_new_tokens=8", f"run_dir={folder}")


@pytest.mark.heavy
def test_a_pair_of_the_hub_writes_what_the_same_files_write_by_name(tmp_path: Path) -> None:
    """In a sweep over ids and names."""
    assert run(tmp_path / "a", "-m", f"model={TARGET},tiny", f"draft={DRAFT},none").code == 0
    points = [tmp_path / "a" / str(point) for point in range(4)]
    summaries = [json.loads((point / "summary.json").read_text()) for point in points]
    assert [(each["model"], each["draft"]) for each in summaries] == [
        (TARGET, DRAFT),
        (TARGET, None),
        ("tiny", DRAFT),
        ("tiny", None),
    ]
    found, _, wanted, _ = (json.loads((point / "run.jsonl").read_text()) for point in points)
    assert (found["token_ids"], found["accepted_lengths"]) == (wanted["token_ids"], wanted["accepted_lengths"])
    assert summaries[0]["forecast"]["plain_ms_per_token"] > 0


@pytest.mark.seconds
@pytest.mark.parametrize("words", [(), ("weights=synthetic",)])
def test_a_plan_and_a_dry_run_need_the_config_file_alone(words: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    if words:
        need("synthetic")
    for weights in cache.rglob("*.safetensors"):
        weights.unlink()
    ended = run(tmp_path / "a", *PAIR, *words, "dry_run=true")
    assert (ended.code, TARGET in ended.out) == (0, True), ended.err
    of_hub = planned(*PAIR, "hardware=laptop_cpu")
    by_name = planned("model=tiny", "draft=tiny-draft", "hardware=laptop_cpu")
    assert of_hub["target"]["name"] == TARGET
    assert of_hub["target"]["num_parameters"] == by_name["target"]["num_parameters"]
    assert of_hub["time"]["plain_ms_per_token"] == by_name["time"]["plain_ms_per_token"]
    refused = run(tmp_path / "b", f"model={TARGET}", "draft=none")
    refused.check_refusal(f"of {TARGET} only other files than weights are in", f"run hf download {TARGET} on a network")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model=zephyr"], "; model=owner/name takes a model of the hub"),
        (["draft=a/b/c"], "neither a name of the catalogue, nor a folder that exists, nor an id of the hub"),
        (["model=acme/absent", "draft=none"], "acme/absent on the hub is not in"),
    ],
)
def test_a_name_that_is_no_model_gets_its_sentence(settings: list[str], sentence: str, tmp_path: Path) -> None:
    run(tmp_path / "a", *settings).check_refusal(sentence)


def test_synthetic_weights_need_the_config_file_of_a_name(tmp_path: Path) -> None:
    need("synthetic")
    ended = run(tmp_path, "model=acme/absent", "draft=none", "weights=synthetic", "dry_run=true")
    ended.check_refusal("run hf download acme/absent")


@pytest.mark.heavy
def test_a_folder_with_the_name_of_an_id_is_taken_if_it_holds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(TARGET).mkdir(parents=True)
    assert run(tmp_path / "a", f"model={TARGET}", "draft=none").summary["model"] == TARGET
    Path(TARGET, "config.json").write_text("{}")
    run(tmp_path / "b", f"model={TARGET}", "draft=none").check_refusal(f"{TARGET}/config.json has no model_type")
    assert run(tmp_path / "c", "model=local", f"model.hub_id={TARGET}", "draft=none").code == 0

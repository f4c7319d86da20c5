"""`plan` gives the plan of `llama-ssp plan`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import plan
from llama_ssp.planning.plan import document
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.weights import hub
from tests.helpers.edits import edit_config
from tests.helpers.hub import shipped
from tests.helpers.in_process import planned


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (
            {"model": "30B", "draft": "7B", "hardware": "8xa100_80gb"},
            ["model=30B", "draft=7B", "hardware=8xa100_80gb"],
        ),
        (
            {"model": "13B", "hardware": "8xa100_80gb", "num_gpus": 2, "num_nodes": 1, "batch_size": 4},
            ["model=13B", "draft=none", "hardware=8xa100_80gb", "hardware.num_gpus=2", "batch_size=4"],
        ),
        (
            {
                "model": "30B",
                "draft": "7B",
                "hardware": "p4d_24xlarge",
                "placement": "sharded",
                "dtype": "fp16",
                "quantization": ("int8", None),
                "cache_dtype": ("fp8", None),
                "num_draft_tokens": "auto",
                "acceptance": 0.6,
                "prompt_tokens": 100,
                "max_new_tokens": 200,
            },
            [
                "model=30B",
                "draft=7B",
                "hardware=p4d_24xlarge",
                "placement=sharded",
                "model.dtype=fp16",
                "draft.model.dtype=fp16",
                "model.quantization=int8",
                "model.cache_dtype=fp8",
                "speculation.num_draft_tokens=auto",
                "speculation.acceptance=0.6",
                "prompt_tokens=100",
                "max_new_tokens=200",
            ],
        ),
        (
            {"model": "65B", "draft": "tinyllama_1B", "hardware": "8xh100"},
            ["model=65B", "draft=tinyllama_1B", "hardware=8xh100"],
        ),
        (
            {"model": "llama3_1B", "draft": "ngram", "hardware": "laptop_cpu"},
            ["model=llama3_1B", "draft=ngram", "hardware=laptop_cpu"],
        ),
    ],
)
def test_a_plan_is_that_of_the_command(arguments: dict[str, Any], settings: list[str]) -> None:
    assert json.loads(json.dumps(document(plan(**arguments)))) == planned(*settings)


def test_the_planner_chooses_the_placement() -> None:
    found = plan("30B", "7B", hardware="p4d_24xlarge", placement="auto")
    assert found.spec.draft_kind in DraftLayout
    assert found.timing.speculative_s
    others = [plan("30B", "7B", hardware="p4d_24xlarge", placement=name) for name in ("one_rank", "sharded")]
    assert found.timing.speculative_s <= min(other.timing.speculative_s or 0.0 for other in others)


def test_this_machine_has_one_gpu_as_the_library_uses_it() -> None:
    found = plan("tiny", "tiny-draft")
    assert len(found.ranks) == 1
    assert found.fits


def test_a_model_of_the_hub_is_planned_from_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shipped("tiny")
    monkeypatch.setattr(hub, "find_config", lambda _model, **_given: folder)
    found = plan("owner/name", hardware="laptop_cpu")
    assert found.spec.target.shape == plan("tiny", hardware="laptop_cpu").spec.target.shape


def test_a_quantized_model_of_the_hub_is_planned_as_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(shipped("tiny"), tmp_path / "m"))
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    monkeypatch.setattr(hub, "find_config", lambda _model, **_given: folder)
    target, plain = (document(plan(name, hardware="1xh100"))["target"] for name in ("owner/name", "tiny"))
    assert (target["stored_format"], plain["stored_format"]) == ("fp8", None)
    assert target["weights_bytes"] < plain["weights_bytes"]


def test_a_folder_in_the_home_is_planned_by_arguments_and_settings_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").symlink_to(shipped("tiny"))
    found = plan("~/m", hardware="laptop_cpu")
    assert found.spec.target.shape == plan("tiny", hardware="laptop_cpu").spec.target.shape
    settings = ["model=local", "model.path='~/m'", "draft=none", "hardware=laptop_cpu"]
    assert planned(*settings)["target"] == document(found)["target"]


def test_a_repr_is_a_line() -> None:
    assert repr(plan("7B", hardware="laptop_cpu")).startswith("Plan(7B, on 1 x ")
    found = repr(plan("65B", "7B", hardware="8xa100_80gb", num_gpus=1))
    assert "\n" not in found
    assert "does not fit" in found
    assert found.endswith(" ms/token)")

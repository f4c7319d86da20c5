"""`task=evaluate` on several ranks: the same verdict wherever the models are, and one gate for all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import run
from tests.helpers.plugins import LAW, launch, with_law

pytestmark = [pytest.mark.distributed(2), pytest.mark.slow]
SETTINGS = ["task=evaluate", "prompt=for i in range(", "num_samples=24", "max_new_tokens=6", "gate=true"]
PLACEMENTS: dict[str, list[str]] = {
    "tensor": [],
    "own_gpu": ["placement=own_gpu"],
    "replicas": ["placement=replicas", "batch_size=5"],
}


def evaluation(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())["evaluation"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = run([*SETTINGS, f"run_dir={folder}"])
    assert done.returncode == 0, done.stderr
    return evaluation(folder)


@pytest.mark.parametrize("placement", ["tensor", "own_gpu", "replicas"])
def test_two_ranks_come_to_the_verdict_of_one(placement: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """The texts are the same, unless rounding changes a draw: one token in some 100000."""
    done = run([*SETTINGS, *PLACEMENTS[placement], f"run_dir={tmp_path}/run"], num_ranks=2)
    assert done.returncode == 0, done.stderr
    found = evaluation(tmp_path / "run")
    assert found["passed"]
    for measure, wanted in zip(found["measures"], alone["measures"], strict=True):
        assert measure["value"] == pytest.approx(wanted["value"], abs=1e-3), measure["name"]


@pytest.mark.parametrize("rule", ["speculative", "block", "coupled"])
def test_texts_of_a_plugins_law_over_parts_of_the_vocabulary_have_the_targets_distribution(
    rule: str, tmp_path: Path
) -> None:
    folder = with_law(tmp_path)
    words = (*SETTINGS, "suite=distribution", "draft=near", "num_samples=64", "batch_size=64", f"verification={rule}")
    done = launch(folder, *words, plugins=LAW, num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert evaluation(folder / "run")["passed"]

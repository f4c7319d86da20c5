"""`task=latency task.store=true`: the acceptance of a run in the user's own folder."""

import json
from pathlib import Path

import pytest
import yaml

from llama_ssp.planning.acceptance import DraftedPair, known
from tests.helpers.in_process import launch
from tests.helpers.own_conf import OwnConf

pytestmark = pytest.mark.seconds

RUN = ("task=latency", "task.num_warmup=0", "max_new_tokens=16", "speculation.num_draft_tokens=3", "device=cpu")


def test_a_run_stores_the_acceptance_that_its_summary_says_and_plans_take_it(own_conf: OwnConf, tmp_path: Path) -> None:
    own_conf("pairs.yaml", "pairs: []\n")
    ended = launch(*RUN, "store=true", f"run_dir={tmp_path}/run")
    assert ended.code == 0, ended.err
    (entry,) = yaml.safe_load((tmp_path / "home" / "llama-ssp" / "measured_pairs.yaml").read_text())["pairs"]
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())["speculative"]["acceptance_rate"]
    assert entry["acceptance"] == pytest.approx(measured, abs=5e-4)
    assert (entry["target"], entry["draft"], entry["temperature"]) == ("tiny", "tiny-draft", 0.8)
    assert "15 prompts, K=3, temperature 0.8, speculative" in entry["source"]
    found = known(DraftedPair(target="tiny", draft="tiny-draft", temperature=0.8))
    assert found
    assert (found.probability, found.ends) == (entry["acceptance"], None)
    assert f"stored an acceptance of {found.probability:.2f} in " in ended.err


@pytest.mark.parametrize("task", ["latency", "generate"])
def test_a_latency_is_that_of_prompts_that_are_read(task: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("import os, " * 20)
    words = ("max_new_tokens=2", "num_samples=2", "batch_size=1", "device=cpu", f"run_dir={tmp_path}/run")
    ended = launch(f"task={task}", *words, f"prompts={tmp_path}/p.txt")
    assert ended.code == 0, ended.err
    tokens = json.loads((tmp_path / "run" / "summary.json").read_text())["prompt_tokens"]
    length = sum(tokens.values()) // 2
    assert length > 40
    assert tokens["num_reused"] == (0 if task == "latency" else length - 1), "the second sample reads the last token"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["draft=none"], "task.store has no effect without a draft"),
        (["weights=synthetic"], "task.store has no effect with weights=synthetic"),
        (
            ["model=local", "model.path=tests", "draft=tiny-draft"],
            "task.store=true stores a pair by the names of its models, and model=local",
        ),
    ],
)
def test_what_has_no_acceptance_or_no_name_is_not_stored(settings: list[str], complaint: str) -> None:
    ended = launch(*RUN[:1], "store=true", *settings)
    assert ended.code == 2
    assert complaint in ended.err

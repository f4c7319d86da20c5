"""`task=latency task.store=true`: the acceptance of a run in the user's own folder."""

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
    assert entry["acceptance"] == pytest.approx(ended.summary["speculative"]["acceptance_rate"], abs=5e-4)
    assert (entry["target"], entry["draft"], entry["temperature"]) == ("tiny", "tiny-draft", 0.8)
    assert "15 prompts, K=3, temperature 0.8, speculative" in entry["source"]
    found = known(DraftedPair(target="tiny", draft="tiny-draft", temperature=0.8))
    assert found
    assert (found.probability, found.ends) == (entry["acceptance"], None)
    assert f"stored an acceptance of {found.probability:.2f} in " in ended.err


def test_a_latency_is_that_of_prompts_that_are_read(tmp_path: Path) -> None:
    """A completion of another task reads the last token alone of a prompt that has been read before."""
    words = ("max_new_tokens=2", "num_samples=2", "batch_size=1", "device=cpu", f"prompt={'import os, ' * 20}")
    read, reused = (
        launch(f"task={task}", *words, f"run_dir={tmp_path}/{task}").summary["prompt_tokens"]
        for task in ("latency", "generate")
    )
    assert (read["num_reused"], read["num_read"] > 80) == (0, True)
    assert reused["num_reused"] == read["num_read"] // 2 - 1


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

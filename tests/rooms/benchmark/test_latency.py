"""`task=latency`: times of prompts that are read, and the acceptance that it stores for plans."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp import catalogue
from llama_ssp.errors import SspError
from llama_ssp.machines import hardware
from llama_ssp.planning.acceptance import Acceptance, known
from llama_ssp.planning.plan import make_plan
from llama_ssp.rooms.benchmark.latency import store
from tests.helpers.in_process import launch
from tests.helpers.own_conf import OwnConf
from tests.helpers.planning import make_spec


def of_pair(target: str, draft: str, temperature: float | None = 0.8) -> Any:  # noqa: ANN401 - it must be known
    return known(target, draft, temperature=temperature)


def entry(acceptance: float, **others: float) -> dict[str, Any]:
    return {"target": "7B", "draft": "tinyllama_1B", "acceptance": acceptance, "source": "measured", **others}


RUN = ("task=latency", "task.num_warmup=0", "max_new_tokens=16", "speculation.num_draft_tokens=3", "device=cpu")


def test_a_run_stores_the_acceptance_that_its_summary_says_and_plans_take_it(own_conf: OwnConf, tmp_path: Path) -> None:
    own_conf("pairs.yaml", "pairs: []\n")
    ended = launch(*RUN, "store=true", f"run_dir={tmp_path}/run")
    assert ended.code == 0, ended.err
    (entry,) = yaml.safe_load((tmp_path / "home" / "llama-ssp" / "measured_pairs.yaml").read_text())["pairs"]
    assert entry["acceptance"] == pytest.approx(ended.summary["speculative"]["acceptance_rate"], abs=5e-4)
    assert (entry["target"], entry["draft"], entry["temperature"]) == ("tiny", "tiny-draft", 0.8)
    assert "15 prompts, K=3, temperature 0.8, speculative" in entry["source"]
    found = known("tiny", "tiny-draft", temperature=0.8)
    assert found
    assert (found.probability, found.ends) == (entry["acceptance"], None)
    assert found.known == tuple(entry["by_position"])
    rounds = [
        one for line in ended.lines for one in zip(line["accepted_lengths"], line["examined_lengths"], strict=True)
    ]
    first = [accepted > 0 for accepted, examined in rounds if examined]
    assert len(found.known) == 3
    assert found.known[0] == pytest.approx(sum(first) / len(first), abs=5e-4)
    assert f"stored an acceptance of {found.probability:.2f} in " in ended.err


@pytest.mark.heavy
def test_a_latency_is_that_of_prompts_that_are_read(tmp_path: Path) -> None:
    """A completion of another task reads the last token alone of a prompt that has been read before."""
    words = ("max_new_tokens=2", "num_samples=2", "batch_size=1", "device=cpu", f"prompt={'import os, ' * 20}")
    read, reused = (
        launch(f"task={task}", *words, f"run_dir={tmp_path}/{task}").summary["prompt_tokens"]
        for task in ("latency", "generate")
    )
    assert (read["num_reused"], read["num_read"] > 80) == (0, True)
    assert reused["num_reused"] == read["num_read"] // 2 - 1


def test_what_is_stored_is_found_and_measuring_again_replaces_it(own_conf: OwnConf) -> None:
    own_conf("pairs.yaml", "pairs: []\n")
    file = store(entry(0.7, low=0.66, high=0.74, temperature=0.8))
    assert file == catalogue.user_dir() / "measured_pairs.yaml"
    assert of_pair("7B", "tinyllama_1B") == Acceptance(probability=0.7, ends=(0.66, 0.74), source="measured")
    store(entry(0.71, temperature=0.8))
    assert of_pair("7B", "tinyllama_1B").probability == 0.71
    assert len(yaml.safe_load(file.read_text())["pairs"]) == 1


def test_a_folder_that_cannot_be_written_is_one_sentence(own_conf: OwnConf) -> None:
    own_conf("pairs.yaml", "pairs: []\n")
    catalogue.user_dir().joinpath("measured_pairs.yaml").mkdir()
    with pytest.raises(SspError, match=r"measured_pairs.yaml cannot be written \(.*\): make its folder writable"):
        store(entry(0.5))


def test_a_plan_of_a_pair_that_nobody_measured_says_how_to_measure_it() -> None:
    spec = make_spec("llama3_70B", "llama3_1B", num_ranks=8, acceptance=None)
    notes = "\n".join(make_plan(spec, hardware.load("8xa100_80gb")).notes)
    assert "llama-ssp run task=latency task.store=true model=llama3_70B draft=llama3_1B" in notes

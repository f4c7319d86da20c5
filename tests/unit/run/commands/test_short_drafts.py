"""A draft whose context is shorter than its target's drafts as far as it can, and the run and its plan say how far."""

import json
import shutil
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.run.commands import own_ranks, plan
from llama_ssp.weights import hub
from tests.helpers.commands import run
from tests.helpers.in_process import call, launch

pytestmark = pytest.mark.seconds

NOTE = "rows go on without the draft behind token {}: the context of draft=local has 64 tokens"
SMALL = ("task=generate", "max_new_tokens=90", "device=cpu", "sampling=greedy", "prompt=def factorial(n):")
PLANNED = ("prompt_tokens=40", "max_new_tokens=90")


@pytest.fixture
def short(tmp_path: Path) -> tuple[str, str]:
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return "draft=local", f"draft.model.path={folder}"


def test_a_run_goes_on_without_its_draft(tmp_path: Path, short: tuple[str, str]) -> None:
    plain = launch(*SMALL, "draft=none", f"run_dir={tmp_path}/plain")
    found = launch(*SMALL, *short, f"run_dir={tmp_path}/run")
    assert (found.code, found.lines[0]["token_ids"]) == (0, plain.lines[0]["token_ids"])
    assert NOTE.format(61) in " ".join(found.err.split())
    planned = call(plan.main, ["model=tiny", *short, *PLANNED, "hardware=1xh100"])
    assert NOTE.format(61) in " ".join(planned.out.split())


@pytest.mark.distributed(2)
def test_a_run_whose_rounds_overlap_goes_on_without_its_draft_and_warns_that_it_is_slower(
    tmp_path: Path, short: tuple[str, str]
) -> None:
    overlaps = ("placement=own_gpu", "speculation.overlap=true", "speculation.num_draft_tokens=1")
    words = [*SMALL, *short, *overlaps, "hardware=laptop_cpu", f"run_dir={tmp_path}/run"]
    plain = launch(*SMALL, "draft=none", f"run_dir={tmp_path}/plain")
    found = run(words, num_ranks=2)
    assert NOTE.format(64) in " ".join(found.stderr.split())
    [line] = map(json.loads, (tmp_path / "run" / "run.jsonl").read_text().splitlines())
    assert line["token_ids"] == plain.lines[0]["token_ids"]
    assert sum(line["accepted_lengths"]) > 10, "the draft serves the beginning"
    planned = call(plan.main, ["model=tiny", *short, *PLANNED, *overlaps, "hardware=2xh100"])
    assert NOTE.format(64) in " ".join(planned.out.split())
    sentence = "warning: overlapping drafting and verification does not gain: forecast "
    [said] = [line for line in found.stderr.splitlines() if "overlapping" in line]
    assert said.startswith(sentence)
    assert said.endswith(" with speculation.overlap=false")
    dry = call(lambda words: own_ranks.main(words, num_ranks=2), [*words, "dry_run=true"])
    assert " ".join(dry.out.split()).count(sentence) == 1

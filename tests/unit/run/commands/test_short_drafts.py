"""A draft whose context is shorter than its target's drafts as far as it can, and the run and its plan say how far."""

import json
import shutil
from pathlib import Path

import pytest

from llama_ssp import catalogue
from llama_ssp.run.commands import plan
from llama_ssp.weights import hub
from tests.helpers.in_process import call, launch

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
    overlaps = ("placement=own_gpu", "speculation.overlap=true", "speculation.num_draft_tokens=1", "hardware=2xh100")
    for words, last in (("hardware=1xh100",), 61), (overlaps, 64):
        planned = call(plan.main, ["model=tiny", *short, *PLANNED, *words])
        assert NOTE.format(last) in " ".join(planned.out.split())

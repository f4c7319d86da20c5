"""A draft whose context is shorter than its target's drafts as far as it can, and the run and its plan say how far."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp import catalogue
from llama_ssp.run.commands import plan
from llama_ssp.run.decoders import context_of
from llama_ssp.run.lengths import problem_of_length
from llama_ssp.run.prompts import Prompt
from llama_ssp.settings.schema import SpeculationConfig
from llama_ssp.weights import hub
from tests.helpers.in_process import call, launch

pytestmark = pytest.mark.seconds

NOTE = "rows go on without the draft behind token 61: the context of draft=local has 64 tokens"
SMALL = ("task=generate", "max_new_tokens=90", "device=cpu", "sampling=greedy", "prompt=def factorial(n):")


def test_a_run_goes_on_without_its_draft(tmp_path: Path) -> None:
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    own = ("draft=local", f"draft.model.path={folder}")
    plain = launch(*SMALL, "draft=none", f"run_dir={tmp_path}/plain")
    found = launch(*SMALL, *own, f"run_dir={tmp_path}/run")
    assert (found.code, found.lines[0]["token_ids"]) == (0, plain.lines[0]["token_ids"])
    assert NOTE in " ".join(found.err.split())
    planned = call(plan.main, ["model=tiny", *own, "prompt_tokens=40", "max_new_tokens=90", "hardware=1xh100"])
    assert NOTE in " ".join(planned.out.split())


def test_a_draft_that_limits_rounds_which_overlap_is_named() -> None:
    sources: Any = [
        SimpleNamespace(origin=SimpleNamespace(context=context), entry=SimpleNamespace(name=name))
        for name, context in (("tiny", 2048), ("short", 64))
    ]
    alone: Any = SimpleNamespace(speculation=SpeculationConfig())
    assert context_of(sources, alone) == (2048, "")
    overlapping: Any = SimpleNamespace(speculation=SpeculationConfig(overlap=True))
    context, whose = context_of(sources, overlapping)
    found = problem_of_length(Prompt(text="x"), 60, max_new_tokens=9, context=context, whose=whose)
    assert found
    assert "the context of 64 of draft=short, which limits rounds that overlap" in found

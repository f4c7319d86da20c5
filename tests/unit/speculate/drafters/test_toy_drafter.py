"""A drafter from outside the package: one Python file and one YAML file, and nothing else."""

import json
from pathlib import Path

import pytest

from tests.helpers.lanes import heavy, slow
from tests.helpers.plugins import launch

MODULE = '''
"""Drafts the last token over and over."""

from dataclasses import dataclass

import llama_ssp.settings.drafters as records
from llama_ssp.settings.schema import DrafterConfig


@dataclass(kw_only=True)
class RepeatConfig(DrafterConfig):
    back: int = 1


class Repeat:
    repeats_operators = True
    reads_by_length = True
    num_allocations = 0

    def __init__(self, num_draft_tokens, back, device):
        import torch

        self.num_draft_tokens, self._back = num_draft_tokens, back
        self._offsets_K = torch.arange(num_draft_tokens, device=device)

    def allocate(self, *, batch_size, num_slots):
        pass

    def prefill(self, prompts, *, rows, buckets):
        pass

    def propose(self, rows, *, num_tokens, uniforms_BKP, bucket, num_unread=2):
        from llama_ssp.speculate.sampling.draft import Draft

        tokens_BS, lengths_B, *_ = rows
        last_B1 = tokens_BS.gather(1, lengths_B[:, None] - self._back)
        ids_BK = last_B1.expand(-1, num_tokens).contiguous()
        tokens_BS.scatter_(1, lengths_B[:, None] + self._offsets_K[:num_tokens], ids_BK)
        return Draft(ids_BK)


def make(parts):
    return Repeat(parts.num_draft_tokens, parts.config.back, parts.device)


records.register(records.DrafterRecord(name="repeat", make="toy_repeat:make", config=RepeatConfig))
'''
OPTION = """
defaults:
  - /schema/draft_repeat@_here_
  - _self_
kind: repeat
back: 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy_repeat.py").write_text(MODULE)
    (tmp_path / "conf" / "draft").mkdir(parents=True)
    (tmp_path / "conf" / "draft" / "repeat.yaml").write_text(OPTION)
    return tmp_path


@pytest.mark.parametrize("sampling", [heavy("greedy"), slow("default")])
def test_a_drafter_from_outside_drafts(sampling: str, folder: Path) -> None:
    words = ("prompt=x = [0, 0, 0, 0,", "max_new_tokens=12", f"sampling={sampling}")
    ended = launch(folder, "draft=repeat", "task=compare", *words, plugins="toy_repeat")
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (folder / "run" / "run.jsonl").read_text().splitlines()]
    drafted = next(line for line in lines if line["mode"] == "speculative")
    assert max(drafted["examined_lengths"]) > 0
    if sampling == "greedy":
        plain = next(line for line in lines if line["mode"] == "plain")
        assert drafted["text"] == plain["text"]
    assert json.loads((folder / "run" / "summary.json").read_text())["draft"] == "repeat"


@pytest.mark.seconds
def test_a_drafter_is_checked_and_planned_by_its_record(folder: Path) -> None:
    planned = launch(folder, "draft=repeat", "dry_run=true", "task=generate", plugins="toy_repeat")
    assert planned.returncode == 0, planned.stderr
    unknown = launch(folder, "draft=repeat", "draft.model.path=x", "task=generate", plugins="toy_repeat")
    assert unknown.returncode == 2
    assert "without a draft model" in unknown.stderr

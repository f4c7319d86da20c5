"""The numbers of a summary are those of their definitions."""

import json
import subprocess
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.provenance import git_commit
from llama_ssp.reports.records import CompletionLine, Forecast, RankActivity, RankMemory, Summary
from llama_ssp.reports.summary import round_gains, speedup, summarise
from llama_ssp.terminal.tables import summary_table
from tests.helpers import runs
from tests.helpers.runs import PLAIN

FACTS = replace(runs.FACTS, memory=[RankMemory(rank=0, measured_peak_bytes=5)])
FAST = replace(runs.FAST, accepted_lengths=[4, 1, 2], examined_lengths=[4, 2, 0], draft_s=0.01, verify_s=0.02)


def summary(*lines: CompletionLine) -> Summary:
    return summarise(FACTS, lines, num_draft_tokens=4)


def test_each_number_has_its_hand_computed_value() -> None:
    found = summary(PLAIN, FAST, replace(FAST, index=1, ms=60.0, share_s=0.06))
    assert (found.num_prompts, found.num_new_tokens) == (2, 30)
    plain, fast = found.plain, found.speculative
    assert plain is not None
    assert (plain.ms_per_token, plain.tokens_per_s, plain.num_target_forwards) == pytest.approx((10, 100, 10))
    assert fast is not None
    assert (fast.ms_per_token, fast.tokens_per_s) == pytest.approx((5, 200))
    assert (fast.num_rounds, fast.num_target_forwards) == (6, 8)
    assert fast.tokens_per_round == pytest.approx((10 - 1) * 2 / 6)
    assert fast.acceptance_rate == pytest.approx(5 / 6)
    assert fast.accepted_histogram == [0, 2, 0, 0, 2]
    assert (fast.draft_s, fast.verify_s, fast.other_s) == pytest.approx((0.02, 0.04, 0.006))


def test_the_speedup_compares_only_completions_that_both_modes_finished() -> None:
    lines = [PLAIN, FAST, replace(PLAIN, index=1, ms=9000.0)]
    assert speedup(lines) == pytest.approx(2.5)
    assert speedup(lines[:1]) is None


def test_a_batch_has_the_throughput_of_its_wall_time() -> None:
    plain = summary(*[replace(PLAIN, index=index, ms=200.0, share_s=0.05) for index in range(4)]).plain
    assert plain is not None
    assert (plain.ms_per_token, plain.tokens_per_s) == pytest.approx((20, 200))


def test_nothing_measured_is_null_and_not_a_division_by_zero() -> None:
    found = summary()
    assert (found.plain, found.speculative, found.speedup, found.overlap) == (None, None, None, None)
    fast = summary(replace(FAST, num_new_tokens=1, num_rounds=0, accepted_lengths=[], examined_lengths=[])).speculative
    assert fast is not None
    assert (fast.tokens_per_round, fast.acceptance_rate) == (None, None)


def test_overlapped_rounds_have_idle_shares_and_dropped_tokens_which_the_terminal_says() -> None:
    placement = {"target": {"ranks": [0, 1]}, "draft": {"ranks": [2]}, "num_replicas": 1}
    line = replace(FAST, num_rounds=5, accepted_lengths=[1, 4, 2, 0, 1], examined_lengths=[1, 4, 3, 1, 1])
    waited = [
        RankActivity(rank=rank, rounds_s=10.0, waited_s=waited_s) for rank, waited_s in enumerate((1.0, 2.0, 5.0))
    ]
    facts = replace(FACTS, placement=placement, world_size=3)
    found = summarise(facts, [line], num_draft_tokens=4, activities=waited)
    assert found.overlap is not None
    assert (found.overlap.target_idle_share, found.overlap.draft_idle_share) == pytest.approx((0.15, 0.5))
    assert (found.overlap.num_drafted_tokens, found.overlap.num_dropped_tokens) == (20, 12)
    console = Console(width=100, record=True, file=StringIO())
    console.print(summary_table(found))
    assert "overlap:  target idle 15 %, draft idle 50 %; 12 of 20 drafted tokens dropped" in console.export_text()


def test_the_target_adds_a_token_after_a_rejection_alone() -> None:
    assert round_gains([1, 4, 2, 0, 1], 4) == [1, 4, 3, 1, 1]


def test_the_file_has_the_fields_that_readers_rely_on(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "seed: 7\n") as folder:
        folder.write_summary(replace(summary(PLAIN, FAST), forecast=Forecast()))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert set(written) == {
        "schema_version", "task", "model", "draft", "weights", "placement", "world_size", "num_prompts",
        "num_new_tokens", "seed", "versions", "git_commit", "plain", "speculative", "speedup", "forecast", "memory",
        "startup", "overlap", "cells", "evaluation", "excerpts", "prompt_tokens", "experts",
        "tree", "forced_lengths", "point", "disturbed", "baseline", "machine",
    }  # fmt: skip
    assert written["schema_version"] == 1
    assert set(written["plain"]) == {"ms_per_token", "tokens_per_s", "num_target_forwards", "first_token_ms"}
    assert set(written["speculative"]) == {
        "ms_per_token", "tokens_per_s", "num_rounds", "num_target_forwards", "tokens_per_round", "acceptance_rate",
        "accepted_histogram", "accepted_by_position", "draft_s", "verify_s", "other_s", "drafted_histogram",
        "first_token_ms",
    }  # fmt: skip
    assert set(written["forecast"]) == {"plain_ms_per_token", "speculative_ms_per_token", "speedup"}
    assert set(written["forecast"].values()) == {None}
    assert written["memory"] == [{"rank": 0, "planned_bytes": None, "measured_peak_bytes": 5}]


def test_the_commit_is_that_of_the_source_tree(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert git_commit(tmp_path) is None
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_commit(tmp_path) == head
    assert summary().versions.keys() == {"python", "torch", "transformers", "llama_ssp"}

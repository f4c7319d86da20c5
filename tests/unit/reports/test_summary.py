"""The numbers of a summary are what their definitions say."""

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.provenance import git_commit, versions
from llama_ssp.reports.records import CompletionLine, RankMemory, RunFacts
from llama_ssp.reports.summary import speedup, summarise

FACTS = RunFacts(
    task="compare",
    model="tiny",
    draft="tiny-draft",
    placement={"target": {"kind": "tensor"}},
    world_size=2,
    seed=7,
    memory=[RankMemory(rank=0, measured_peak_bytes=5)],
)


PLAIN = CompletionLine(
    index=0, sample=0, mode="plain", prompt="p", text="t", token_ids=[1] * 10, num_new_tokens=10,
    finish_reason="length", num_rounds=0, num_target_forwards=10, accepted_lengths=[], examined_lengths=[],
    ms=100.0, share_s=0.1,
)  # fmt: skip
FAST = replace(
    PLAIN, mode="speculative", num_rounds=3, num_target_forwards=4, accepted_lengths=[4, 1, 2],
    examined_lengths=[4, 2, 0], ms=40.0, share_s=0.04, draft_s=0.01, verify_s=0.02, other_s=0.005,
)  # fmt: skip


def test_each_number_has_its_hand_computed_value() -> None:
    summary = summarise(FACTS, [PLAIN, FAST, replace(FAST, index=1, ms=60.0, share_s=0.06)], num_draft_tokens=4)
    assert summary.num_prompts == 2
    assert summary.num_new_tokens == 30
    assert summary.plain is not None
    assert summary.plain.ms_per_token == pytest.approx(10)
    assert summary.plain.tokens_per_s == pytest.approx(100)
    assert summary.plain.num_target_forwards == 10
    fast = summary.speculative
    assert fast is not None
    assert fast.ms_per_token == pytest.approx(5)
    assert fast.tokens_per_s == pytest.approx(200)
    assert (fast.num_rounds, fast.num_target_forwards) == (6, 8)
    assert fast.tokens_per_round == pytest.approx((10 - 1) * 2 / 6)
    assert fast.acceptance_rate == pytest.approx(5 / 6)
    assert fast.accepted_histogram == [0, 2, 0, 0, 2]
    assert (fast.draft_s, fast.verify_s, fast.other_s) == pytest.approx((0.02, 0.04, 0.01))


def test_the_speedup_compares_only_completions_that_both_modes_finished() -> None:
    lines = [PLAIN, FAST, replace(PLAIN, index=1, ms=9000.0)]
    assert speedup(lines) == pytest.approx(2.5)
    assert speedup(lines[:1]) is None


def test_a_batch_has_the_throughput_of_its_wall_time() -> None:
    rows = [replace(PLAIN, index=index, ms=200.0, share_s=0.05) for index in range(4)]
    plain = summarise(FACTS, rows, num_draft_tokens=4).plain
    assert plain is not None
    assert plain.ms_per_token == pytest.approx(20)
    assert plain.tokens_per_s == pytest.approx(200)


def test_nothing_measured_is_null_and_not_a_division_by_zero() -> None:
    summary = summarise(FACTS, [], num_draft_tokens=4)
    assert (summary.plain, summary.speculative, summary.speedup) == (None, None, None)
    at_once = replace(FAST, num_new_tokens=1, num_rounds=0, accepted_lengths=[], examined_lengths=[])
    fast = summarise(FACTS, [at_once], num_draft_tokens=4).speculative
    assert fast is not None
    assert (fast.tokens_per_round, fast.acceptance_rate) == (None, None)


def test_the_file_has_the_fields_that_readers_rely_on(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "seed: 7\n") as folder:
        folder.write_summary(summarise(FACTS, [PLAIN, FAST], num_draft_tokens=4))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert set(written) == {
        "schema_version", "task", "model", "draft", "weights", "placement", "world_size", "num_prompts",
        "num_new_tokens", "seed", "versions", "git_commit", "plain", "speculative", "speedup", "forecast", "memory",
        "startup", "overlap", "cells", "evaluation", "excerpts",
    }  # fmt: skip
    assert written["schema_version"] == 1
    assert set(written["plain"]) == {"ms_per_token", "tokens_per_s", "num_target_forwards", "first_token_ms"}
    assert set(written["speculative"]) == {
        "ms_per_token", "tokens_per_s", "num_rounds", "num_target_forwards", "tokens_per_round", "acceptance_rate",
        "accepted_histogram", "draft_s", "verify_s", "other_s", "drafted_histogram",
        "first_token_ms",
    }  # fmt: skip
    assert list(written["forecast"]) == [
        "plain_ms_per_token", "speculative_ms_per_token", "speedup", "plain_ms_per_token_low",
        "plain_ms_per_token_high", "speculative_ms_per_token_low", "speculative_ms_per_token_high",
    ]  # fmt: skip
    assert set(written["forecast"].values()) == {None}
    assert written["memory"] == [{"rank": 0, "planned_bytes": None, "measured_peak_bytes": 5}]


def test_a_line_has_the_fields_that_readers_rely_on() -> None:
    promised = {
        "index", "sample", "mode", "prompt", "text", "token_ids", "num_new_tokens", "finish_reason", "num_rounds",
        "accepted_lengths", "ms",
    }  # fmt: skip
    assert promised < asdict(PLAIN).keys()


def test_versions_name_python_and_the_packages() -> None:
    found = versions()
    assert list(found) == ["python", "torch", "transformers", "llama_ssp"]
    assert found["python"] is not None
    assert found["torch"] is not None


def test_the_commit_is_that_of_the_source_tree(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert git_commit(tmp_path) is None
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_commit(tmp_path) == head

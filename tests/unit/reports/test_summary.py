"""The numbers of a summary are those of their definitions, and a run folder keeps what was finished."""

import errno
import json
import os
import subprocess
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.reports.folder import RunFolder, write_failure
from llama_ssp.reports.provenance import git_commit
from llama_ssp.reports.records import CompletionLine, Forecast, RankActivity, RankMemory, Summary
from llama_ssp.reports.summary import round_gains, speedup, summarise
from llama_ssp.terminal.tables import summary_table
from tests.helpers import runs
from tests.helpers.runs import PLAIN, ToyCell

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
        "schema_version",
        "task",
        "model",
        "draft",
        "weights",
        "placement",
        "world_size",
        "num_prompts",
        "num_new_tokens",
        "seed",
        "versions",
        "git_commit",
        "plain",
        "speculative",
        "speedup",
        "forecast",
        "memory",
        "startup",
        "overlap",
        "cells",
        "evaluation",
        "excerpts",
        "prompt_tokens",
        "experts",
        "reproducible",
        "tree",
        "forced_lengths",
        "point",
        "disturbed",
        "baseline",
        "machine",
    }
    assert written["schema_version"] == 1
    assert set(written["plain"]) == {"ms_per_token", "tokens_per_s", "num_target_forwards", "first_token_ms"}
    assert set(written["speculative"]) == {
        "ms_per_token",
        "tokens_per_s",
        "num_rounds",
        "num_target_forwards",
        "tokens_per_round",
        "acceptance_rate",
        "accepted_histogram",
        "accepted_by_position",
        "draft_s",
        "verify_s",
        "other_s",
        "drafted_histogram",
        "first_token_ms",
    }
    assert written["forecast"].pop("tokens_per_round_range") == []
    names = {"plain_ms_per_token", "speculative_ms_per_token", "speedup", "tokens_per_round"}
    assert written["forecast"] == dict.fromkeys(names)
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


CONFIG = "seed: 0\nrun_dir: null\ntask:\n  name: compare\n"


def line(index: int = 0, *, text: str = "x", mode: str = "speculative") -> CompletionLine:
    return CompletionLine(
        index=index,
        sample=0,
        mode=mode,
        prompt="p",
        text=text,
        token_ids=[1, 2],
        num_new_tokens=2,
        finish_reason="length",
        num_rounds=1,
        num_target_forwards=2,
        accepted_lengths=[0],
        examined_lengths=[1],
        ms=2.5,
        share_s=0.0025,
    )


def write(path: Path, *lines: CompletionLine) -> None:
    with RunFolder(path, CONFIG) as folder:
        for line in lines:
            folder.append(line)


def test_a_reopened_folder_knows_its_finished_completions(tmp_path: Path) -> None:
    write(tmp_path / "new" / "run", line(0), line(1, mode="plain"))
    with RunFolder(tmp_path / "new" / "run", CONFIG) as folder:
        assert folder.finished == {(0, "speculative", 0), (1, "plain", 0)}
        assert folder.lines == [line(0), line(1, mode="plain")]


def test_a_folder_of_a_version_without_conversations_is_resumed(tmp_path: Path) -> None:
    write(tmp_path, line(0))
    file = tmp_path / "run.jsonl"
    old = json.loads(file.read_text())
    file.write_text(json.dumps({name: old[name] for name in old.keys() - {"turn", "question_id", "category"}}) + "\n")
    with RunFolder(tmp_path, CONFIG) as folder:
        assert folder.lines == [line(0)]


def test_lines_are_put_in_the_order_of_their_prompts_and_more_can_follow(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG) as folder:
        for index, mode in ((2, "plain"), (0, "plain"), (2, "speculative"), (0, "speculative")):
            folder.append(line(index, mode=mode, text="\udcff" if index else "x"))
        folder.put_in_order()
        folder.append(line(1))
    with RunFolder(tmp_path, CONFIG) as folder:
        found = [(line.index, line.mode) for line in folder.lines]
    assert found == [(0, "plain"), (0, "speculative"), (2, "plain"), (2, "speculative"), (1, "speculative")]


@pytest.mark.parametrize("num_lost", [1, 100])
def test_a_torn_last_line_is_dropped_and_the_next_one_starts_afresh(tmp_path: Path, num_lost: int) -> None:
    write(tmp_path, line(0), line(1))
    file = tmp_path / "run.jsonl"
    os.truncate(file, file.stat().st_size - num_lost)
    with RunFolder(tmp_path, CONFIG) as folder:
        assert folder.lines == [line(0)]
        folder.append(line(2))
    assert [json.loads(line)["index"] for line in file.read_bytes().splitlines()] == [0, 2]


@pytest.mark.parametrize("text", ["a\nb\u2028c\x85d\x1b[31m", "emoji 🙂, 你好", "null \x00"])
def test_any_text_of_a_model_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    write(tmp_path, line(0, text=text), line(1))
    with RunFolder(tmp_path, CONFIG) as folder:
        assert folder.lines == [line(0, text=text), line(1)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"index": 0', b'"index": "0"'),
        (b'"ms"', b'"mz"'),
        (b'"speculative"', b'"spekulative"'),
        (b'"num_rounds": 1', b'"num_rounds": 1000000000000'),
        (b'{"index"', b'["index"'),
        (b'"x"', b'"\xff"'),
        (b'"x"', b"[" * 5000 + b"]" * 5000),
        (b'"ms": 2.5', b'"ms": NaN'),
        (b'"examined_lengths": [1]', b'"examined_lengths": [1000000000]'),
        (b'"token_ids": [1, 2]', b'"token_ids": []'),
        (b'"finish_reason": "length"', b'"finish_reason": "bored"'),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    write(tmp_path, line(5), line(0), line(1))
    file = tmp_path / "run.jsonl"
    first, damaged, last = file.read_bytes().splitlines(keepends=True)
    assert old in damaged
    file.write_bytes(first + damaged.replace(old, new) + last)
    with pytest.raises(ConfigError, match=r"run\.jsonl cannot be resumed: line 2 is damaged: .*; remove such"):
        RunFolder(tmp_path, CONFIG)


def test_completions_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    write(tmp_path, line(0), line(0, mode="plain"))
    file = tmp_path / "run.jsonl"
    file.write_bytes(file.read_bytes() + line(0, text="y").to_json() + b"\n" + line(0, mode="plain").to_json())
    with pytest.raises(ConfigError, match=r"cannot be resumed: line 3 repeats line 1; remove such a line"):
        RunFolder(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        (CONFIG, CONFIG.replace("seed: 0", "seed: 1") + "a: 1\n", "(a was null and is now 1; seed was 0 and is now 1)"),
        (CONFIG, CONFIG.replace("compare", "latency"), 'task.name was "compare" and is now "latency"'),
        (CONFIG, CONFIG + "timeouts2: 5\n", "timeouts2 was null and is now 5"),
        (CONFIG, CONFIG + "stop_strings: [a]\n", 'stop_strings was null and is now ["a"]'),
        (CONFIG + "".join(f"k{num:03d}: 1\n" for num in range(100)), CONFIG, "k009 was 1 and is now null; 90 more)"),
        (f"seed: {'x' * 9999}\n", "seed: 0\n", f'seed was "{"x" * 199} and is now 0'),
        ("seed: 2026-11-21\nrun_dir: !!binary aaaa\n", "seed: 0\n", 'seed was "2026-11-21" and is now 0'),
        (CONFIG, CONFIG.replace("run_dir: null", "run_dir: here") + "timeouts:\n  load_s: 5\n", ""),
        (CONFIG, CONFIG + "stop_strings: []\nmin_p: null\n", ""),
    ],
    ids=["several", "nested", "a similar name", "a list", "many", "long", "other types", "changeable", "off"],
)
def test_a_changed_config_is_refused_by_the_names_of_its_differences(
    old: str, new: str, changes: str, tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / "config.yaml").write_text(old)
    if not changes:
        RunFolder(tmp_path, new).close()
    else:
        with pytest.raises(ConfigError, match="belongs to another config") as refused:
            RunFolder(tmp_path, new)
        assert changes in str(refused.value)
    assert (tmp_path / "config.yaml").read_text() == old


@pytest.mark.parametrize(
    "text", ["[" * 5000, "seed: [\udcff", "seed: 2026-99-99", "seed: 0b_", "&a {seed: *a}", "x" * 2_000_000]
)
def test_a_config_that_no_run_has_written_is_one_sentence(text: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged; name another run_dir, or restore it"):
        RunFolder(tmp_path, CONFIG)


@pytest.mark.parametrize("file", ["config.yaml", "run.jsonl", "toys.jsonl"])
def test_what_is_no_file_is_one_sentence(file: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(SspError, match="not a regular file"):
        RunFolder(tmp_path, CONFIG, ToyCell)


def test_a_second_job_is_kept_out_and_let_in_afterwards(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
        RunFolder(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="another config"):
        RunFolder(tmp_path, "seed: 3\n")
    write(tmp_path)


def test_the_status_follows_the_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG) as folder:
        assert (tmp_path / "status").read_text() == "running\n"
        write_failure(tmp_path, exit_code=2, sentence="no \x1b[2J")
        assert (tmp_path / "status").read_text() == "2: no \\x1b[2J\n"
        folder.write_status("done")
    assert (tmp_path / "status").read_text() == "done\n"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_full_disk_is_a_sentence_and_the_folder_can_be_resumed(tmp_path: Path) -> None:
    write(tmp_path, line(0))
    with RunFolder(tmp_path, CONFIG) as folder:
        (tmp_path / "run.jsonl").rename(tmp_path / "moved")
        (tmp_path / "run.jsonl").symlink_to("/dev/full")
        with pytest.raises(SspError, match=r"run\.jsonl: no space left on device; free some space"):
            folder.append(line(1))
        assert folder.finished == {(0, "speculative", 0)}
    (tmp_path / "moved").replace(tmp_path / "run.jsonl")
    with RunFolder(tmp_path, CONFIG) as folder:
        assert folder.lines == [line(0)]


def test_the_status_of_a_full_disk_is_written_over_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a block of the disk, and a file that is to replace it finds none."""
    sync = os.fsync

    def full(number: int) -> None:
        if Path(f"/proc/self/fd/{number}").readlink().suffix == ".tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    sentence = "cannot use run.jsonl: no space left on device; free some space"
    with RunFolder(tmp_path, CONFIG) as folder:
        monkeypatch.setattr(os, "fsync", full)
        write_failure(tmp_path, exit_code=2, sentence=sentence)
        assert (tmp_path / "status").read_text() == f"2: {sentence}\n"
        folder.write_status("interrupted")
        assert (tmp_path / "status").read_text() == "interrupted\n"
        write_failure(tmp_path, exit_code=2, sentence="x" * 9000)
        assert (tmp_path / "status").read_text() == f"2: {'x' * 4092}\n", "no more than a block"
        with pytest.raises(SspError, match="no space left"):
            folder.write_kept("models.json", "{}")


def test_a_run_dir_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SspError, match="name a run_dir that can be written"):
        RunFolder(tmp_path / "file", CONFIG)

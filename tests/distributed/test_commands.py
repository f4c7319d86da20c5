"""The command as a user types it: what it prints, what it leaves, and how it ends when it is disturbed."""

import json
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import Popen, run, start
from tests.helpers.disturbed import lines, pid_of_rank, wait_for
from tests.helpers.lanes import heavy, slow

LONG = ["task=generate", "task.format=jsonl", "max_new_tokens=32", "num_samples=30", "prompt=def f(x):"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Path, Popen]]:
    """A run on two ranks that has recorded its first completions and has many to go."""
    process = start([*LONG, f"run_dir={tmp_path}/run"], num_ranks=2)
    wait_for(lambda: len(lines(tmp_path / "run")) > 1 or process.poll() is not None, at_most_s=90)
    yield tmp_path / "run", process
    process.kill()
    process.communicate()


def check_logs(run_dir: Path) -> None:
    """Each rank says where it is and what it holds; rank 0 also what made the run."""
    logs = [(run_dir / "ranks" / f"00{rank}.log").read_text() for rank in range(2)]
    assert (run_dir / "run.log").read_text() == logs[0]
    assert "this rank holds slice 1 of 2 of the target and the draft, in replica 0\n" in logs[0]
    assert "this rank holds slice 2 of 2 of the target, in replica 0\n" in logs[1]
    assert f"rank 1 of 2 on {platform.node()}, cpu (" in logs[1]
    assert "rank 0 of 2 on" not in logs[1]
    layout = "placement: target on ranks 0 1, draft on rank 0 (one_rank); replicas: 1\n"
    made_by = [
        "rank 0 of 2 on ",
        "rank 1 of 2 on ",
        "python 3.",
        ", torch 2.",
        "GPUs: none, ",
        "forecast for hardware ",
    ]
    assert [text for text in [*made_by, layout] if text not in logs[0]] == []


@pytest.mark.distributed(2)
def test_the_default_command_ends_with_a_table_and_a_summary(tmp_path: Path) -> None:
    done = run([f"run_dir={tmp_path}/a run", "max_new_tokens=12"], num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout
    summary = json.loads((tmp_path / "a run" / "summary.json").read_text())
    assert (summary["schema_version"], summary["task"], summary["world_size"]) == (1, "compare", 2)
    assert summary["num_new_tokens"] == 2 * summary["num_prompts"] * 12
    assert summary["plain"]["num_target_forwards"] == summary["num_prompts"] * 12
    assert summary["speculative"]["tokens_per_round"] > 1
    assert summary["forecast"]["speedup"] > 0
    assert summary["memory"][1]["planned_bytes"] > 0
    assert [memory["rank"] for memory in summary["memory"]] == [0, 1]
    assert (tmp_path / "a run" / "status").read_text() == "done\n"
    names = {str(path.relative_to(tmp_path / "a run")) for path in (tmp_path / "a run").rglob("*") if path.is_file()}
    assert names == {
        "config.yaml", "lock", "models.json", "ranks/000.log", "ranks/001.log", "report.html", "run.jsonl", "run.log",
        "status", "summary.json",
    }  # fmt: skip
    check_logs(tmp_path / "a run")


@pytest.mark.distributed(2)
@pytest.mark.heavy
def test_an_error_is_told_once_and_first_and_its_code_stands_in_the_status(tmp_path: Path) -> None:
    done = run([f"model.path={tmp_path}/nothing", f"run_dir={tmp_path}/run"], num_ranks=2)
    assert done.returncode == 1
    sentence = f"{tmp_path}/nothing does not exist"
    assert done.stderr.startswith(sentence)
    assert sum(line.startswith(sentence) for line in done.stderr.splitlines()) == 1
    assert (tmp_path / "run" / "status").read_text().startswith(f"2: {sentence}")


@pytest.mark.distributed(2)
@pytest.mark.parametrize("rank", [slow(0), heavy(1)])
def test_a_killed_rank_ends_the_job_within_ten_seconds(rank: int, running: tuple[Path, Popen]) -> None:
    run_dir, process = running
    os.kill(pid_of_rank(run_dir, rank), signal.SIGKILL)
    assert process.wait(timeout=10) != 0
    assert all(line["num_new_tokens"] for line in lines(run_dir))


@pytest.mark.distributed(2)
@pytest.mark.heavy
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_run_says_so_and_is_resumed_without_repeating_anything(
    number: signal.Signals, running: tuple[Path, Popen]
) -> None:
    run_dir, process = running
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert (run_dir / "status").read_text() == "interrupted\n", stderr
    before = lines(run_dir)
    assert 0 < len(before) < 30
    assert json.loads((run_dir / "summary.json").read_text())["num_new_tokens"] > 0

    config = (run_dir / "config.yaml").read_text()
    assert "num_samples: 30" in config
    done = run([*LONG, f"run_dir={run_dir}"])
    assert done.returncode == 0, done.stderr
    after = lines(run_dir)
    assert after[: len(before)] == before
    assert [line["sample"] for line in after] == list(range(30))

"""The command as a user types it: what it prints, what it leaves, and how it ends when it is disturbed."""

import json
import platform
from pathlib import Path

import pytest

from tests.helpers.commands import run


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

"""Runs as a user types them: what two ranks print and leave, and copies that share out the prompts."""

import json
import platform
import signal
from pathlib import Path

import pytest

from llama_ssp.reports.formats import FORMATS
from tests.helpers.commands import command, run, started
from tests.helpers.disturbed import lines, wait_for
from tests.helpers.lanes import slow


@pytest.mark.slow
@pytest.mark.distributed(2)
def test_two_copies_leave_the_texts_of_one_in_prompt_order(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def read(self):\nimport os\nclass Error(\n11 * 37 =\n    # parse the file\n")
    settings = ["task=generate", "task.format=jsonl", f"prompts={prompts}", "num_samples=3", "max_new_tokens=8"]
    alone = run([*settings, "batch_size=2", f"run_dir={tmp_path}/alone"])
    copies = run([*settings, "batch_size=2", "placement.num_replicas=2", f"run_dir={tmp_path}/copies"], num_ranks=2)
    assert (alone.returncode, copies.returncode) == (0, 0), copies.stderr
    wanted = {(line["index"], line["sample"]): line["token_ids"] for line in lines(tmp_path / "alone")}
    found = [((line["index"], line["sample"]), line["token_ids"]) for line in lines(tmp_path / "copies")]
    assert [key for key, _ in found] == sorted(wanted)
    assert dict(found) == wanted
    assert len(copies.stdout.splitlines()) >= len(wanted), "rank 0 prints what every copy has finished"
    summary = json.loads((tmp_path / "copies" / "summary.json").read_text())
    assert (summary["num_prompts"], summary["num_new_tokens"], summary["world_size"]) == (5, 5 * 3 * 8, 2)
    assert summary["placement"]["num_replicas"] == 2
    assert [rank["rank"] for rank in summary["memory"] if rank["planned_bytes"]] == [0, 1]
    assert (tmp_path / "copies" / "status").read_text() == "done\n"


@pytest.mark.slow
@pytest.mark.distributed(2)
def test_the_last_point_of_a_sweep_makes_its_baseline_again_also_on_a_copy_without_prompts(tmp_path: Path) -> None:
    words = ["placement.num_replicas=2", "prompt=import os", "max_new_tokens=8", f"run_dir={tmp_path}/sweep"]
    ended = run(["-m", *words, "speculation.num_draft_tokens=2,4"], num_ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "sweep" / "1" / "summary.json").read_text())["baseline"]["ms_per_token"] > 0


@pytest.mark.distributed(2)
@pytest.mark.parametrize("placement", [slow("placement=replicas"), slow("placement=sharded")])
def test_a_later_turn_follows_the_answer_of_whichever_copy_gave_it(placement: str, tmp_path: Path) -> None:
    """Three conversations, so that copies share out first turns and second ones in different ways."""
    questions = tmp_path / "questions.jsonl"
    turns = [["import os", "def f(x):", "class A"], ["11 * 37 ="], ["def read(self):", "def write(self):"]]
    questions.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    settings = ["task=generate", "task.format=jsonl", f"prompts={questions}", "num_samples=2", "max_new_tokens=8"]
    for num_ranks, name, more in ((1, "alone", []), (2, "copies", [placement])):
        done = run([*settings, "batch_size=2", *more, f"run_dir={tmp_path}/{name}"], num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
    wanted, found = (
        {(line["index"], line["sample"]): line["token_ids"] for line in lines(tmp_path / name)}
        for name in ("alone", "copies")
    )
    assert len(found) == 12
    assert found == wanted


@pytest.mark.slow
@pytest.mark.distributed(2)
def test_interrupted_copies_end_together_and_are_resumed_without_repeating_anything(tmp_path: Path) -> None:
    settings = ["task=generate", "task.format=jsonl", "prompt=def f(x):", "num_samples=60", "placement=replicas"]
    settings += ["max_new_tokens=32", f"run_dir={tmp_path}/run"]
    with started(command(settings, num_ranks=2)) as process:
        wait_for(lambda: len(lines(tmp_path / "run")) > 3 or process.poll() is not None, at_most_s=90)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert (tmp_path / "run" / "status").read_text() == "interrupted\n", stderr
    before = lines(tmp_path / "run")
    assert 0 < len(before) < 60
    assert {int(str(line["sample"])) % 2 for line in before} == {0, 1}, "both copies have handed over what they had"
    done = run(settings, num_ranks=2)
    assert done.returncode == 0, done.stderr
    after = lines(tmp_path / "run")
    assert [line["sample"] for line in after] == list(range(60))
    assert [line for line in after if line in before] == before


@pytest.mark.distributed(3)
@pytest.mark.heavy
def test_ranks_that_would_hold_nothing_are_an_error_that_says_so(tmp_path: Path) -> None:
    done = run(["placement.target.ranks=[0,1]", f"run_dir={tmp_path}/run"], num_ranks=3)
    assert done.returncode == 2
    assert done.stderr.startswith("rank 2 would hold nothing: the target is on ranks 0 1, the draft on rank 0; name")
    assert not (tmp_path / "run").exists()


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
@pytest.mark.heavy
def test_the_default_command_ends_with_a_table_and_a_summary(tmp_path: Path) -> None:
    with started(command([f"run_dir={tmp_path}/a run", "max_new_tokens=12"], num_ranks=2)) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "speed-up" in out
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
        "config.yaml",
        "lock",
        "models.json",
        "ranks/000.log",
        "ranks/001.log",
        "run.jsonl",
        "run.log",
        "status",
        "summary.json",
        *(form.file for form in FORMATS.all().values() if form.purpose),
    }
    check_logs(tmp_path / "a run")


@pytest.mark.distributed(2)
@pytest.mark.heavy
def test_an_error_is_told_once_and_first_and_its_code_stands_in_the_status(tmp_path: Path) -> None:
    done = run([f"model.path={tmp_path}/nothing", f"run_dir={tmp_path}/run"], num_ranks=2)
    assert done.returncode == 2
    sentence = f"{tmp_path}/nothing does not exist"
    assert done.stderr.startswith(sentence)
    assert sum(line.startswith(sentence) for line in done.stderr.splitlines()) == 1
    assert (tmp_path / "run" / "status").read_text().startswith(f"2: {sentence}")

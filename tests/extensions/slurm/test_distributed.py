"""Batch jobs on a real SLURM: what they leave, what disturbs them, and a cluster that leaves nothing."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.slurm.cluster import Cluster, why_not
from tests.helpers.commands import command, started
from tests.helpers.disturbed import (
    CELLS,
    Cell,
    check_end,
    check_resumption,
    has_begun,
    is_alive,
    lines,
    pid_of_rank,
    settings,
    wait_for,
)
from tests.helpers.extensions import module_of
from tests.helpers.in_process import launch
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.starters import PROGRAM, environment
from tests.helpers.terminals import OnTerminal

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

FOUR = [
    "hydra.launcher.ranks_per_node=2",
    "hydra.launcher.max_running=2",
    "speculation.num_draft_tokens=2,4",
    "seed=0,1",
    "max_new_tokens=8",
]
SHIPPED = ROOT / "llama_ssp" / "shipped"
SHORT = ["task=generate", "max_new_tokens=8", "prompt=import os", "device=cpu"]
LONG = ["task=generate", "task.format=jsonl", "max_new_tokens=48", "num_samples=40", "prompt=def f(x):", "device=cpu"]
TWO = ["hydra.launcher.ranks_per_node=1", "seed=0,1", *LONG]


def submit(cluster: Cluster, folder: Path, *words: str, options: tuple[str, ...] = ("--ntasks-per-node=2",)) -> str:
    """Queue launch/slurm.sbatch as a user does; returns the job's id."""
    script = [str(ROOT / "launch" / "slurm.sbatch"), "--root", str(ROOT), "--python", sys.executable]
    return cluster.run("sbatch", "--parsable", *options, *script, *words, cwd=folder)


def sweep(cluster: Cluster, folder: Path, *words: str) -> list[str]:
    """Submit the points of a sweep; returns their jobs."""
    common = ["-m", "hydra/launcher=slurm", "hardware=laptop_cpu"]
    said = cluster.run(sys.executable, ROOT / "launch" / "run.py", *common, *words, cwd=folder)
    return [line.split()[0] for line in said.splitlines() if " is job " in line]


def settled(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must not depend on how a run came about: all but times, in the order of their keys."""
    timed = {"ms", "first_token_ms", "share_s", "draft_s", "verify_s", "other_s"}
    kept = [{name: value for name, value in line.items() if name not in timed} for line in found]
    return sorted(kept, key=lambda line: (line["index"], line["mode"], line["sample"]))


@pytest.mark.slow
def test_a_sweep_ends_with_a_run_folder_for_every_point_and_one_report(cluster: Cluster, tmp_path: Path) -> None:
    jobs = sweep(cluster, tmp_path, *FOUR, "run_dir=a sweep")
    assert len(jobs) == 4
    for place, job in enumerate(jobs):
        log = tmp_path / "a sweep" / str(place) / "slurm.log"
        assert cluster.wait(job)["JobState"] == "COMPLETED", log.read_text()
    points = []
    for place in range(4):
        folder = tmp_path / "a sweep" / str(place)
        assert (folder / "status").read_text() == "done\n"
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["world_size"] == 2
        points.append((len(summary["speculative"]["accepted_histogram"]) - 1, summary["seed"]))
    assert points == [(2, 0), (2, 1), (4, 0), (4, 1)]
    module_of("reports.command")
    said = cluster.run(sys.executable, ROOT / "launch" / "report.py", "a sweep", cwd=tmp_path)
    assert said == "wrote a sweep/report.html and runs.csv: 4 runs"
    report = (tmp_path / "a sweep" / "report.html").read_text()
    assert all(f"a sweep/{place}" in report for place in range(4))


@pytest.mark.slow
def test_a_stopped_task_of_an_array_requeues_itself_alone(cluster: Cluster, tmp_path: Path) -> None:
    first, last = sweep(cluster, tmp_path, *TWO, "run_dir=sweep")
    assert (first[-2:], last[-2:]) == ("_0", "_1")
    for place in ("0", "1"):
        cluster.until(lambda: len(lines(tmp_path / "sweep" / place)) > 1, "completions", at_most_s=120)  # noqa: B023
    cluster.run("scancel", "--signal=TERM", last)  # SLURM gives the last task the id of the whole array
    cluster.until(lambda: cluster.job(last)["Restarts"] == "1", "the task to queue itself again", at_most_s=60)
    assert [cluster.wait(job)["JobState"] for job in (first, last)] == ["COMPLETED"] * 2
    assert cluster.job(first)["Restarts"] == "0"
    assert [len(lines(tmp_path / "sweep" / place)) for place in ("0", "1")] == [40, 40]


@pytest.mark.slow
def test_a_requeued_task_of_an_array_resumes_and_ends_like_an_undisturbed_run(cluster: Cluster, tmp_path: Path) -> None:
    """As after preemption, with the same job id: what had been written stays as it is, with its times."""
    jobs = sweep(cluster, tmp_path, *TWO, "run_dir=sweep")
    folders = [tmp_path / "sweep" / place for place in ("0", "1")]
    for job, folder in zip(jobs, folders, strict=True):
        cluster.until(lambda: len(lines(folder)) > 2, "completions", at_most_s=120)  # noqa: B023
        cluster.run("scontrol", "requeue", job)
    kept = []
    for job, folder in zip(jobs, folders, strict=True):
        cluster.until(lambda: cluster.job(job)["Restarts"] == "1", "the requeued task", at_most_s=60)  # noqa: B023
        kept.append((folder / "run.jsonl").read_bytes())
    for job, folder, before in zip(jobs, folders, kept, strict=True):
        assert cluster.wait(job, at_most_s=240)["JobState"] == "COMPLETED", (folder / "slurm.log").read_text()
        assert 2 < before.count(b"\n") < 40, "otherwise nothing was left to do"
        assert (folder / "run.jsonl").read_bytes().startswith(before[: before.rindex(b"\n") + 1])
        assert (folder / "status").read_text() == "done\n"
        assert cluster.job(job)["Restarts"] == "1", "it has not queued itself as well"
    assert launch(*LONG, "seed=1", f"run_dir={tmp_path}/alone").code == 0
    assert settled(lines(folders[1])) == settled(lines(tmp_path / "alone"))


@pytest.mark.slow  # a minute, and the time limits of SLURM want a quiet machine
def test_a_run_that_is_warned_and_stopped_ends_like_an_undisturbed_one(cluster: Cluster, tmp_path: Path) -> None:
    """The warning before the time limit comes while it loads; each end leaves a line in the log."""
    words = [*LONG, "num_samples=12"]
    job = submit(cluster, tmp_path, *words)
    run_dir, sizes = tmp_path / "outputs" / f"slurm-{job}", [0]
    begun = {
        "scancel --signal=USR1": (run_dir / "config.yaml").exists,
        "scancel --signal=TERM": lambda: len(lines(run_dir)) > 2,
    }
    for restarts, (cancel, is_there) in enumerate(begun.items(), start=1):
        wait_for(is_there, at_most_s=120)
        ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)] if restarts == 2 else []
        for pid in ranks:  # until the signal has come, so that few completions are left
            os.kill(pid, signal.SIGSTOP)
        cluster.run(*cancel.split(), job)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        cluster.until(lambda: cluster.job(job)["Restarts"] == str(restarts), "the next start", at_most_s=60)  # noqa: B023
        assert (run_dir / "status").read_text() == "interrupted\n"
        sizes.append(len(lines(run_dir)))
    log = (tmp_path / f"slurm-{job}.log").read_text
    assert cluster.wait(job)["JobState"] == "COMPLETED", log()
    assert 0 <= sizes[1] < sizes[2] < 12
    assert log().count("queues itself again") == 2
    assert "Traceback" not in log()
    assert "User defined signal 1" not in log(), "the signal killed ranks before they could handle it"
    assert len([line for line in log().splitlines() if not line.startswith("{")]) < 40, log()
    assert not list(tmp_path.glob(".slurm-*"))
    assert launch(*words, f"run_dir={tmp_path}/alone").code == 0
    assert settled(lines(run_dir)) == settled(lines(tmp_path / "alone"))


@pytest.mark.heavy
def test_a_job_over_two_nodes_is_one_run_with_weights_on_their_own_disks(cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "own disk" / "tiny"
    words = ["--stage", str(SHIPPED / "tiny"), str(copy), "model=local", f"model.path='{copy}'", "draft=tiny-draft"]
    job = submit(cluster, tmp_path, *words, *SHORT, "run_dir=run", options=("--nodes=2", "--gpus-per-node=2"))
    assert cluster.wait(job)["JobState"] == "COMPLETED", (tmp_path / f"slurm-{job}.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["model"]) == (4, "tiny")
    assert {file.name for file in copy.iterdir()} == {file.name for file in (SHIPPED / "tiny").iterdir()}
    assert [file.name for file in copy.parent.iterdir()] == ["tiny"]


@pytest.mark.slow
def test_each_of_two_nodes_has_a_stage_of_the_target(cluster: Cluster, tmp_path: Path) -> None:
    words, options = ["placement.target.stages=2", "run_dir=run"], ("--nodes=2", "--ntasks-per-node=2")
    job = submit(cluster, tmp_path, *SHORT, *words, options=options)
    assert cluster.wait(job)["JobState"] == "COMPLETED", (tmp_path / f"slurm-{job}.log").read_text()
    target = json.loads((tmp_path / "run" / "summary.json").read_text())["placement"]["target"]
    assert target == {"kind": "tensor", "ranks": [0, 1, 2, 3], "tp_size": 2, "stages": 2, "groups": 1}
    assert launch(*SHORT, f"run_dir={tmp_path}/alone").code == 0
    texts = [[line["text"] for line in settled(lines(tmp_path / name))] for name in ("run", "alone")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_copies_on_two_nodes_share_the_prompts_of_one_run_and_leave_them_in_order(
    cluster: Cluster, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\ndef f(x):\nclass A:\nfrom re\nx = 1\n")
    words = ["task=generate", "max_new_tokens=8", "num_samples=2", "prompts=prompts.txt", "device=cpu", "run_dir=run"]
    options = ("--nodes=2", "--ntasks-per-node=2")
    # All rows of a copy end together, so that the order in which they end is not that of the prompts.
    job = submit(cluster, tmp_path, *words, "placement.num_replicas=2", "batch_size=5", options=options)
    assert cluster.wait(job)["JobState"] == "COMPLETED", (tmp_path / f"slurm-{job}.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["placement"]["num_replicas"]) == (4, 2)
    assert summary["placement"]["target"]["ranks"] == [0, 1], "each copy has the ranks of one node"
    found = lines(tmp_path / "run")
    assert [(line["index"], line["sample"]) for line in found] == [(i, sample) for i in range(5) for sample in (0, 1)]
    words[3:4], words[-1:] = [f"prompts={prompts}"], [f"run_dir={tmp_path}/alone"]
    assert launch(*words).code == 0
    assert [line["text"] for line in found] == [line["text"] for line in settled(lines(tmp_path / "alone"))]


@pytest.mark.heavy
def test_a_mistake_ends_the_job_with_its_own_exit_code_and_is_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, *SHORT, "sampling.top_p=2")
    state = cluster.wait(job)
    said = (cluster.folder / "slurmctld.log").read_text()[-2000:]
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0"), said
    assert "sampling.top_p=2.0 must be above 0" in (tmp_path / f"slurm-{job}.log").read_text()


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled_and_leaves_nothing_but_its_run(cluster: Cluster, tmp_path: Path) -> None:
    """Its usual port is taken, so that it takes another one."""
    job = submit(cluster, tmp_path, *LONG, "run_dir=run", options=("--ntasks-per-node=2", "--hold"))
    with socket.create_server(("127.0.0.1", 20000 + int(job) % 10000)):
        cluster.run("scontrol", "release", job)
        cluster.until(lambda: len(lines(tmp_path / "run")) > 1, "first completions", at_most_s=120)
    cluster.run("scancel", job)
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    cluster.until(lambda: (tmp_path / "run" / "status").read_text() == "interrupted\n", "the end", at_most_s=30)
    cluster.until(lambda: not list(tmp_path.glob(".slurm-*")), "the batch script", at_most_s=30)
    assert cluster.job(job)["JobState"] == "CANCELLED"
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert "Traceback" not in log
    assert len([line for line in log.splitlines() if not line.startswith("{")]) < 16, log


TESTS = """
import sys, time
from pathlib import Path
from tests.extensions.slurm.cluster import Cluster
from tests.helpers.extensions import module_of
with Cluster(Path(sys.argv[1])) as cluster:
    cluster.run("sbatch", "--wrap", "sleep 100", cwd=cluster.folder)
    print(*(daemon.pid for daemon in cluster._daemons), cluster._run, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("number", [heavy(signal.SIGTERM), slow(signal.SIGKILL)])
def test_no_daemon_outlives_tests_that_a_signal_ends(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-c", TESTS, str(tmp_path / "cluster")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        *pids, folder = tests.stdout.readline().split()
        tests.send_signal(number)
        wait_for(lambda: not Path(folder).exists() and not any(is_alive(int(pid)) for pid in pids), at_most_s=90)
    assert len(pids) == 4


AT_MOST_S = 15


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_disturbed_rank_ends_its_step_and_nothing_is_lost(cluster: Cluster, cell: Cell, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["srun", "--ntasks=2", "--nodes=1", "--kill-on-bad-exit=1", *command(settings(cell, run_dir))]
    with started(words, env=cluster.environment, stdout=subprocess.DEVNULL) as step:
        wait_for(lambda: has_begun(cell, run_dir) or step.poll() is not None, at_most_s=120)
        ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)]
        os.kill(ranks[cell.rank], cell.number)
        errors = step.communicate(timeout=AT_MOST_S)[1]
    assert step.returncode
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), at_most_s=2)
    check_end(cell, run_dir, [errors])
    assert "Traceback" not in errors
    check_resumption(cell, run_dir, lines(run_dir))


RUN = shlex.join([*PROGRAM, "run", "task=generate", "max_new_tokens=4", "device=cpu", "prompt=import os"])


def shell(cluster: Cluster, *, num_tasks: int) -> OnTerminal:
    words = ["srun", f"--ntasks={num_tasks}", "--pty", "bash", "--norc"]
    return OnTerminal(words, more=environment({**cluster.environment, "TERM": "dumb"}))


@pytest.mark.slow
def test_each_command_is_a_run_with_a_folder_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    with shell(cluster, num_tasks=1) as made:
        made.enter(f"cd {tmp_path}; {RUN}; echo ended-$?; {RUN} seed=1; echo ended-$?\n")
        made.wait_for(lambda: made.shown.count("ended-0") == 2, at_most_s=150)
    assert len([*(tmp_path / "outputs").iterdir()]) == 2


@pytest.mark.slow
def test_a_shell_of_several_tasks_is_told_what_starts_the_other_ranks(cluster: Cluster, tmp_path: Path) -> None:
    starts_all = "srun --overlap --ntasks=2"
    with shell(cluster, num_tasks=2) as made:
        made.enter(f"cd {tmp_path}; {RUN}\n")
        awaited = (
            "waiting for rank 1 until timeouts.load_s=1800: each of the 2 tasks of this SLURM step has to run this"
        )
        made.wait_for(lambda: awaited in " ".join(made.shown.split()), at_most_s=90)
        made.wait_for(lambda: f"{starts_all} before it starts all" in " ".join(made.shown.split()), at_most_s=5)
        made.enter("\x03")
        made.wait_for(lambda: "interrupted" in made.shown, at_most_s=30)
        made.enter(f"{starts_all} {RUN}; echo ended-$?\n")
        made.wait_for(lambda: "ended-0" in made.shown, at_most_s=150)

"""The batch script with stand-ins for SLURM's commands: when it queues its job again, and when it gives up.

tests/extensions/slurm submits real jobs.
"""

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from launch import check_gpus
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds

# srun is what the script starts ranks with: here a run that ends at once, having recorded so many completions.
SRUN = """#!/usr/bin/env bash
printf '%s\\0' "$RUN_ID" "$MASTER_PORT" "$@" >started
if [ -n "$RUN_DIR" ]; then
    printf '%s\\n' "$RUN_DIR" >"$RUN_DIR_FILE"
    mkdir -p "$RUN_DIR"
    for ((i = 0; i < LINES_MADE; i++)); do echo '{}' >>"$RUN_DIR/run.jsonl"; done
fi
exit "$CODE"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
"show job") echo "JobId=7 JobState=$STATE Reason=None" ;;
"show hostnames") echo n1 ;;
*) echo "$@" >>requeued ;;
esac
"""


class Job:
    """A job that is started again and again in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(
        self,
        *options: str,
        code: int = 4,
        made: int = 0,
        state: str = "RUNNING",
        run_dir: str | None = "a run",
        restarts: int = 0,
        task: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the script once, as a task of array 9 if one is given; it ends with `code` after `made` completions."""
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "CODE": str(code),
            "LINES_MADE": str(made),
            "STATE": state,
            "RUN_DIR": run_dir or "",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        if task is not None:
            environment |= {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": task}
        return subprocess.run(
            ["bash", str(ROOT / "launch" / "slurm.sbatch"), *options, *([] if task else ["model=tiny"])],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    @property
    def num_requeued(self) -> int:
        file = self.folder / "requeued"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def left_files(self) -> list[str]:
        return sorted(file.name for file in self.folder.glob(".slurm-*"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("run_dir", ["a run", None], ids=["no completion", "ends before there is a run folder"])
def test_a_job_that_gets_nowhere_gives_up_after_some_tries(run_dir: str | None, job: Job) -> None:
    for number in range(1, 4):
        assert job.start(run_dir=run_dir).returncode == 4
        assert (job.num_requeued, job.left_files) == (number, [".slurm-7.idle"])
    ended = job.start(run_dir=run_dir)
    assert (ended.returncode, job.num_requeued, job.left_files) == (4, 3, [])
    assert ended.stderr.startswith("interrupted 4 times in a row without a new completion: job 7 gives up; submit it")


def test_a_job_that_gets_on_is_queued_again_as_often_as_it_takes(job: Job) -> None:
    for number in range(1, 5):
        assert job.start("--idle", "1", made=number % 2).returncode == 4
        assert job.num_requeued == number
    assert job.start(code=0).returncode == 0
    assert job.left_files == []


def test_the_number_of_tries_is_an_option(job: Job) -> None:
    assert (job.start("--idle", "0").returncode, job.num_requeued) == (4, 0)
    wrong = job.start("--idle", "many")
    assert (wrong.returncode, wrong.stderr) == (2, "--idle many: give a number of times, such as 3\n")
    task = job.start("--arguments-in", "nowhere", task="3")
    assert (task.returncode != 0, "nowhere/3/job.args" in task.stderr) == (True, True)


def test_where_nothing_can_be_kept_every_restart_counts(job: Job) -> None:
    for restarts, num_requeued in ((0, 1), (2, 2), (3, 2)):
        (job.folder / ".slurm-7.idle").mkdir(exist_ok=True)
        assert job.start(made=1, restarts=restarts).returncode == 4
        assert job.num_requeued == num_requeued


def test_a_port_that_is_taken_is_passed_over_and_the_job_names_the_run(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 20007)):
        assert job.start(code=0).returncode == 0
    name, port = (job.folder / "started").read_text().split("\0")[:2]
    assert (name, port) == ("slurm-7", "20404")


def test_a_job_whose_ports_are_all_taken_says_so_and_queues_itself_again(job: Job) -> None:
    (job.folder / "python").write_text("#!/usr/bin/env bash\nexit 0\n")
    (job.folder / "python").chmod(0o755)
    ended = job.start("--python", str(job.folder / "python"))
    assert (ended.returncode, job.num_requeued) == (4, 1)
    assert ended.stderr.startswith("every port that job 7 has tried on ")


@pytest.mark.parametrize(
    ("code", "state", "ended"), [(1, "RUNNING", 1), (3, "RUNNING", 3), (4, "CANCELLED", 4), (137, "RUNNING", 1)]
)
def test_a_failed_and_a_cancelled_job_are_not_queued_again(code: int, state: str, ended: int, job: Job) -> None:
    """A rank that a signal has ended is a lost one."""
    assert job.start(code=code, state=state).returncode == ended
    assert (job.num_requeued, job.left_files) == (0, [])


def test_a_task_of_an_array_reads_its_own_arguments_and_requeues_itself_alone(job: Job) -> None:
    settings = ["prompt=a $(b)\n'c' \"d\"", "run_dir='x/3'"]
    (job.folder / "sweep, 1" / "3").mkdir(parents=True)
    words = ["--root", str(ROOT), "--idle", "1", "--", *settings]
    (job.folder / "sweep, 1" / "3" / "job.args").write_text("".join(f"{word}\0" for word in words))
    ended = job.start("--arguments-in", "sweep, 1", task="3")
    assert ended.returncode == 4, ended.stderr
    started = (job.folder / "started").read_text().split("\0")
    assert started[started.index(str(ROOT / "launch" / "run.py")) + 1 :] == [*settings, ""]
    assert (job.folder / "requeued").read_text() == "requeue 9_3\n", "job 9 is the whole array"
    assert job.left_files == [".slurm-9_3.idle"]
    job.start("--arguments-in", "sweep, 1", task="3")
    assert job.num_requeued == 1, "--idle was read from the file"


def test_a_device_that_cannot_answer_or_computes_something_else_has_its_reason_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_gpus.fault_of(torch.device("cpu")) is None
    fault = check_gpus.fault_of(torch.device("meta"))
    assert fault
    assert "\n" not in fault
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda first, _second: torch.zeros_like(first))
    assert check_gpus.fault_of(torch.device("cpu")) == "a product in torch.float32 sums to 0 instead of 65536"


def test_every_gpu_that_fails_or_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {0: None, 1: "no kernel image is available"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(faults))
    monkeypatch.setattr(check_gpus, "fault_of", lambda device: faults[device.index])
    assert check_gpus.main(["8"]) == 2
    said = capsys.readouterr()
    assert said.err == f"torch {torch.__version__} on cuda:1: no kernel image is available\n"
    faults[1] = None
    assert check_gpus.main(["8"]) == 0
    assert capsys.readouterr().out == f"torch {torch.__version__} computes on 2 of 8 GPUs\n"
    faults.clear()
    assert check_gpus.main([]) == 0
    assert check_gpus.main(["8"]) == 2
    assert "sees none of the 8 GPUs" in capsys.readouterr().err

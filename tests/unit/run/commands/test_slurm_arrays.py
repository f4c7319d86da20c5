"""Sweeps on a cluster as job arrays, and the table of all jobs at the end of a dry run; sbatch is a stand-in."""

from pathlib import Path

import pytest

from tests.helpers.sbatch import Sweep, options

pytestmark = pytest.mark.seconds


@pytest.mark.heavy
def test_only_so_many_jobs_run_at_a_time(sweep: Sweep) -> None:
    words = ["model=7B,13B", "hardware=p4d_24xlarge,8xa100_80gb,g5_12xlarge", "draft=tinyllama_1B"]
    calls = sweep(*words, "hydra.launcher.max_running=2").calls
    asked = [(options(call).get("array"), options(call)["gres"], options(call).get("dependency")) for call in calls]
    assert sorted((array, gpus) for array, gpus, _ in asked) == [("0,1,3,4%2", "gpu:8"), ("2,5%2", "gpu:4")]
    assert [after for _, _, after in asked] == [None, "afterany:101"], "one array after the other"


@pytest.mark.heavy
def test_points_that_ask_for_the_same_are_one_array_and_one_point_is_a_job(sweep: Sweep) -> None:
    [call] = sweep("hardware=laptop_cpu", "seed=0,1", "run_dir='50%, x'").calls
    assert (options(call)["array"], options(call)["job-name"]) == ("0,1", "llama-ssp")
    assert options(call)["output"] == "50%%, x/%a/slurm.log"
    [alone] = sweep("hardware=laptop_cpu", "seed=0").calls[1:]
    assert "array" not in options(alone)
    assert options(alone)["job-name"] == "llama-ssp-0"


@pytest.mark.heavy
def test_a_refusal_of_sbatch_is_told_with_what_is_queued_already(sweep: Sweep) -> None:
    ended = sweep("hardware=laptop_cpu", "seed=0,1,2", "run_dir=x,y,y", refusal="y")
    assert ended.code == 2
    assert ended.err.startswith("sbatch refused 6 jobs, 1 to 8, as one array: Batch job submission failed")
    assert ended.err.endswith("; to cancel what is queued already: scancel 101\n")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.heavy
def test_a_sweep_that_ends_halfway_names_what_it_has_queued(sweep: Sweep) -> None:
    Path("x/y").mkdir(parents=True)
    Path("x/y/2").touch()
    ended = sweep("hardware=laptop_cpu", "run_dir=a,b,x/y")
    assert (ended.code, len(ended.calls)) == (2, 2)
    assert "run_dir=x/y/2 cannot be made: File exists" in ended.err
    assert ended.err.endswith("; to cancel what is queued already: scancel 101 102\n")
    long = sweep("hardware=laptop_cpu", "prompts=null", f"prompt={'x' * 2**17}")
    assert long.code == 2
    assert "sbatch cannot be started: Argument list too long" in long.err


@pytest.mark.heavy
def test_the_report_of_a_sweep_is_of_all_its_folders(sweep: Sweep) -> None:
    alone = sweep("hardware=laptop_cpu", "seed=1,2", "run_dir=a")
    assert alone.out.endswith("when they have ended: llama-ssp report a\n")
    several = sweep("hardware=laptop_cpu", "seed=1,2", "run_dir='a b',c")
    assert several.out.endswith("when they have ended: llama-ssp report 'a b' c --output=DIR\n")


def test_a_dry_run_ends_with_one_table_of_all_jobs_also_of_those_that_do_not_fit(sweep: Sweep) -> None:
    ended = sweep("hardware=g5_12xlarge", "model=7B,65B", "draft=tinyllama_1B", "dry_run=true")
    assert (ended.code, ended.calls) == (3, [])
    assert ended.err.startswith("job 1 (")
    table = ended.out.partition("All jobs;")[2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert [(row[0], row[1]) for row in rows] == [("0 model=7B", "yes"), ("1 model=65B", "no"), ("2 jobs", "1 of 2")]
    milliseconds, hours, gpu_hours = (float(text.strip("<")) for text in rows[1][2:])
    assert milliseconds > 0
    assert gpu_hours == pytest.approx(4 * hours, abs=0.02)
    assert "would be queued" not in ended.out, "nothing would"

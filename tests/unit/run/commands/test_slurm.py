"""Sweeps on a cluster without one: what is refused before it is queued, and how a stand-in for sbatch is called."""

import shlex
from pathlib import Path

import pytest

from tests.helpers.lanes import slow
from tests.helpers.sbatch import Sweep, composed, options, script

pytestmark = pytest.mark.seconds


@pytest.mark.heavy
def test_every_point_becomes_a_job_with_its_own_settings_and_run_folder(sweep: Sweep) -> None:
    ended = sweep("hardware=p4d_24xlarge", "model=30B,13B", "speculation.num_draft_tokens=2,4", "run_dir='a, b'")
    assert ended.code == 0, ended.err
    configs = [composed(job) for job in ended.jobs]
    assert [(config.model.name, config.speculation.num_draft_tokens, config.run_dir) for config in configs] == [
        ("30B", 2, "a, b/0"), ("30B", 4, "a, b/1"), ("13B", 2, "a, b/2"), ("13B", 4, "a, b/3"),
    ]  # fmt: skip
    assert [options(job)["output"] for job in ended.jobs] == [f"a, b/{number}/slurm.log" for number in range(4)]
    assert all(Path(f"a, b/{number}").is_dir() for number in range(4))
    assert [options(call)["array"] for call in ended.calls] == ["0,1,2,3"]
    assert "101_0 is job 0" in ended.out
    assert ended.out.count("ms/token plain") == 4


def test_a_job_asks_for_the_gpus_of_the_hardware_that_it_was_planned_for(sweep: Sweep) -> None:
    [job] = sweep("hardware=p4d_24xlarge", "model=30B", "hydra.launcher.nodes=2").jobs
    asked = options(job)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gres"]) == ("2", "8", "gpu:8")
    assert "partition" not in asked


@pytest.mark.heavy
def test_every_setting_of_the_launcher_reaches_sbatch(sweep: Sweep) -> None:
    [job] = sweep(
        "hardware=p4d_24xlarge", "model=7B", "draft=tinyllama_1B", "hydra.launcher.ranks_per_node=4",
        "hydra.launcher.partition=gpu", "hydra.launcher.account=me", "hydra.launcher.time=4:00:00",
        "hydra.launcher.memory=64G", "hydra.launcher.gres=gpu:a100:4", "hydra.launcher.constraint=nvlink",
        "hydra.launcher.cpus_per_rank=8", "hydra.launcher.container=[apptainer,exec]",
        'hydra.launcher.sbatch=["--mail-type=END"]',
    ).jobs  # fmt: skip
    wanted = {
        "partition": "gpu", "account": "me", "time": "4:00:00", "mem": "64G", "gres": "gpu:a100:4",
        "constraint": "nvlink", "cpus-per-task": "8", "ntasks-per-node": "4", "mail-type": "END",
    }  # fmt: skip
    assert wanted.items() <= options(job).items()
    own = job[script(job) + 1 : job.index("--")]
    assert own[2:] == ["--python", "python", "--prefix", "apptainer", "--prefix", "exec"]


def test_a_prompt_reaches_the_job_as_it_was_typed(sweep: Sweep) -> None:
    prompt = 'it\'s $(rm -rf), "f" [1, {2}] ${x}\\'
    [job] = sweep("hardware=laptop_cpu", f"prompt={prompt}").jobs
    assert composed(job).prompt == prompt


def test_a_job_does_not_get_the_settings_that_only_other_points_read(sweep: Sweep) -> None:
    words = ["task=evaluate", "suite=agreement,arithmetic", "num_prompts=5", "prompt=import"]
    ended = sweep("hardware=laptop_cpu", *words)
    assert ended.code == 0, ended.err
    assert [word for job in ended.jobs for word in job if word.startswith(("task.num_prompts", "prompt="))] == [
        "prompt=import", "task.num_prompts=5",
    ]  # fmt: skip
    assert "warning: job 0 (" in ended.err
    assert ended.err.count(" has no effect on suite=") == 2


@pytest.mark.heavy
def test_a_point_that_does_not_fit_keeps_all_from_being_queued(sweep: Sweep) -> None:
    ended = sweep("hardware=g5_12xlarge", "model=7B,65B,13B", "draft=7B", "hydra.launcher.nodes=1")
    assert (ended.code, ended.jobs) == (3, [])
    assert ended.err.startswith("job 1 (")
    assert ended.out == ""
    assert "model=65B" in ended.err
    assert "GiB" in ended.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model=7B"], "name it with hardware=NAME, one of "),
        (["hardware=laptop_cpu", "seed=0,-1"], "seed=-1 must be between 0"),
        slow(["hardware=laptop_cpu", "seed=0,x"], "seed=x: Value 'x'"),
        slow(["hardware=laptop_cpu", "prompts=-"], "prompts=- asks at a terminal"),
        (["hardware=p4d_24xlarge", "hydra.launcher.ranks_per_node=9"], "more than the 8 GPUs of a node"),
        slow(["hardware=laptop_cpu", "hydra.launcher.nodes=2"], "does not say how nodes are connected"),
        slow(["hardware=laptop_cpu", "hydra.launcher.nodes=0"], "hydra.launcher.nodes=0 must be at least 1"),
        slow(["hardware=laptop_cpu", "hydra.launcher.sbatch=[evil.sh]"], "would take it for a script"),
        slow(["hardware=laptop_cpu", "hydra.launcher.stage_to=here"], "must be an absolute path"),
        slow(["hardware=laptop_cpu", "hydra.launcher.queue=x"], "hydra.launcher.queue"),
        (["hardware=laptop_cpu", "hydra.launcher._target_=os.system"], "_target_ is refused"),
        slow(["hardware=laptop_cpu", "hydra.sweeper.max_batch_size=1"], "use hydra.launcher.max_running"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_queued(
    arguments: list[str], sentence: str, sweep: Sweep
) -> None:
    ended = sweep(*arguments)
    assert (ended.code, ended.jobs) == (2, [])
    assert sentence in ended.err
    assert len(ended.err.splitlines()) == 1


def test_the_launcher_is_refused_without_a_sweep(sweep: Sweep) -> None:
    ended = sweep("hardware=laptop_cpu", multirun=False)
    assert (ended.code, ended.jobs) == (2, [])
    assert "add -m" in ended.err
    assert "sbatch launch/slurm.sbatch" in ended.err


@pytest.mark.heavy
def test_several_ranks_do_not_submit_a_sweep_several_times(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = sweep("hardware=laptop_cpu")
    assert (ended.code, ended.jobs) == (2, [])
    assert "with plain python, on one rank" in ended.err


@pytest.mark.heavy
def test_a_dry_run_shows_every_plan_and_command_and_queues_nothing(sweep: Sweep) -> None:
    ended = sweep("hardware=p4d_24xlarge", "model=30B,13B", "dry_run=true", installed=False)
    assert (ended.code, ended.jobs) == (0, []), ended.err
    assert ended.out.count("Memory per rank") == 2
    [command] = [shlex.split(line) for line in ended.out.splitlines() if line.startswith("  sbatch ")]
    assert (options(command)["array"], options(command)["gres"]) == ("0,1", "gpu:8")
    assert list(Path().iterdir()) == []
    [alone] = [
        line
        for line in sweep("hardware=p4d_24xlarge", "model=30B", "dry_run=true").out.splitlines()
        if "sbatch" in line
    ]
    assert composed(shlex.split(alone)).model.name == "30B"
    assert "dry_run" not in alone


@pytest.mark.heavy
def test_what_the_planner_may_place_is_planned_as_it_would_place_it(sweep: Sweep) -> None:
    ended = sweep(
        "hardware=8xa100_80gb", "placement=auto", "model=30B", "hydra.launcher.ranks_per_node=4", "dry_run=true"
    )
    assert ended.code == 0, ended.err
    assert "draft 7B fp16 sharded over 4 ranks" in " ".join(ended.out.split())


@pytest.mark.heavy
def test_a_machine_without_slurm_says_what_would_work(sweep: Sweep) -> None:
    ended = sweep("hardware=laptop_cpu", installed=False)
    assert ended.code == 2
    assert "needs sbatch" in ended.err
    assert "dry_run=true" in ended.err


@pytest.mark.heavy
def test_a_job_inherits_nothing_that_describes_the_process_that_submits(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "3")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RUN_ID", "mine")
    monkeypatch.setenv("ROLE_NAME", "default")
    monkeypatch.setenv("LLAMA_SSP_AGENT", "1")
    kept = {"GROUP_HOME", "LOCAL_SCRATCH", "ROLE_OF_MINE", "MASTER_COPY", "RANKING", "SLURM_CONF"}
    for name in kept:
        monkeypatch.setenv(name, "kept")
    [environment] = sweep("hardware=laptop_cpu").environments
    assert {"SLURM_NTASKS_PER_NODE", "MASTER_PORT", "RUN_ID", "ROLE_NAME", "LLAMA_SSP_AGENT"} & set(
        environment
    ) == set()
    assert kept <= set(environment)

"""Sweeps on a cluster without one: what is refused before it is queued, and how a stand-in for sbatch is called.

Points that ask for the same are tasks of an array; jobs may copy their weights to the nodes first.
"""

import shlex
from pathlib import Path

import pytest

from llama_ssp.settings import catalogue
from llama_ssp.weights import hub
from tests.helpers.hub import COMMIT, put
from tests.helpers.lanes import slow
from tests.helpers.sbatch import Sweep, composed, options, script, sweeps

pytestmark = pytest.mark.seconds


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """A function that submits a sweep with a stand-in for sbatch, in an empty folder."""
    return sweeps(monkeypatch, tmp_path, capsys)


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


STAGED = ("hardware=laptop_cpu", "hydra.launcher.stage_to=/scratch/of me")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped model as acme/tiny in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return put(tmp_path / "hub", "acme/tiny", hub.resolve(catalogue.load("tiny")).iterdir())


@pytest.mark.heavy
def test_weights_are_staged_under_a_name_that_changes_with_them(sweep: Sweep, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for file in hub.resolve(catalogue.load("tiny")).iterdir():
        (weights / file.name).symlink_to(file)
    asked = ["model=local", f"model.path={weights}", "draft=tiny-draft", *STAGED]
    [job] = sweep(*asked).jobs
    place = job.index("--stage")
    source, copy = job[place + 1 : place + 3]
    assert source == str(weights)
    assert composed(job).model.path == copy
    assert Path(copy).parent == Path("/scratch/of me")
    assert job.count("--stage") == 1, "shipped weights stay where they are"
    (weights / "more.json").write_text("{}")
    assert copy not in sweep(*asked).jobs[-1]


@pytest.mark.heavy
def test_a_hub_model_that_is_not_here_cannot_be_staged(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_args, **_options: None)
    words = ("hardware=p4d_24xlarge", "model=7B", "draft=none", "task=generate")
    ended = sweep(*words, "hydra.launcher.stage_to=/scratch")
    assert (ended.code, ended.jobs) == (2, [])
    assert f"hf download {catalogue.load('7B').hub_id}" in ended.err


@pytest.mark.heavy
def test_a_hub_model_of_which_only_the_config_is_here_cannot_be_staged(sweep: Sweep, snapshot: Path) -> None:
    for weights in snapshot.glob("*.safetensors"):
        weights.unlink()
    ended = sweep("model=acme/tiny", f"model.revision={COMMIT}", "draft=none", "task=generate", *STAGED)
    assert (ended.code, ended.jobs) == (2, [])
    assert f"not in the hub's cache: hf download acme/tiny --revision {COMMIT}" in ended.err


@pytest.mark.usefixtures("snapshot")
def test_a_job_reads_a_copy_instead_of_a_revision_on_the_hub(sweep: Sweep) -> None:
    both = (f"model.revision={COMMIT}", "draft=local", "draft.model.hub_id=acme/tiny", "draft.model.revision=main")
    ended = sweep("model=acme/tiny", *both, *STAGED)
    assert ended.code == 0, ended.err
    [job] = ended.jobs
    run = composed(job)
    assert run.draft.model
    assert Path(str(run.model.path)).parent == Path(str(run.draft.model.path)).parent == Path("/scratch/of me")


@pytest.mark.heavy
def test_synthetic_weights_are_not_staged(sweep: Sweep) -> None:
    ended = sweep("model=7B", "draft=tinyllama_1B", "weights=synthetic", "hardware=p4d_24xlarge", STAGED[1])
    assert ended.code == 0, ended.err
    [job] = ended.jobs
    assert "--stage" not in job
    assert composed(job).model.path is None

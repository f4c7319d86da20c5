"""Sweeps on a cluster without one: what is refused before it is queued, and how a stand-in for sbatch is called.

Points that ask for the same are tasks of an array; jobs may copy their weights to the nodes first.
"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.run.commands.own_ranks import Start, read_start
from llama_ssp.settings import checks
from llama_ssp.settings.schema import RunConfig
from tests.helpers.composed import compose_run
from tests.helpers.extensions import need
from tests.helpers.hub import COMMIT, put, shipped
from tests.helpers.in_process import Ended, launch
from tests.helpers.installed import install, llama_ssp
from tests.helpers.lanes import heavy, slow
from tests.helpers.own_conf import OwnConf, write_all, writer
from tests.unit.run.commands.test_control_characters import HOSTILE, assert_harmless

CPU = "hardware=laptop_cpu"
STAGED = (CPU, "hydra.launcher.stage_to=/scratch/of me")
SBATCH = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], sorted(os.environ)]) + "\\n")
if {refusal!r} in sys.argv[-2:]:
    sys.exit("sbatch: error: Batch job submission failed: Invalid\\n  partition")
print(100 + len(open({log!r}).readlines()))
"""


@dataclass(frozen=True, kw_only=True)
class Submitted(Ended):
    """How a sweep was submitted."""

    calls: list[list[str]]
    environments: list[list[str]]

    @property
    def jobs(self) -> list[list[str]]:
        """A command for each job: of an array, what each of its tasks makes of it."""
        return [job for call in self.calls for job in tasks(call)]


Sweep = Callable[..., Submitted]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sweep:
    """A function that submits a sweep with a stand-in for sbatch, in an empty folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def submit(*arguments: str, installed: bool = True, refusal: str = "never", multirun: bool = True) -> Submitted:
        log, program = tmp_path / "log", tmp_path / "bin" / "sbatch"
        if installed:
            program.write_text(SBATCH.format(python=sys.executable, log=str(log), refusal=refusal))
            program.chmod(0o755)
        ended = launch(*(["-m"] if multirun else []), "hydra/launcher=slurm", *arguments)
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return Submitted(**vars(ended), calls=[job for job, _ in calls], environments=[env for _, env in calls])

    return submit


def tasks(call: list[str]) -> list[list[str]]:
    """The call of each task of an array, as launch/slurm.sbatch reads its arguments; or the call itself."""
    if "--arguments-in" not in call:
        return [call]
    folder = Path(call[-1])
    indices = options(call)["array"].partition("%")[0].split(",")
    words = [(folder / index / "job.args").read_bytes().decode().split("\0") for index in indices]
    assert all(each.pop() == "" for each in words)
    own = call[: call.index("--arguments-in")]
    return [
        [word.replace("%a", index).replace("%%", "%") for word in own] + each
        for index, each in zip(indices, words, strict=True)
    ]


def composed(job: list[str]) -> RunConfig:
    """What run.py makes of the settings in a job's command, checked."""
    config, explicit = compose_run(*job[job.index("--") + 1 :])
    return checks.check(config, explicit, world_size=1).config


def options(job: list[str]) -> dict[str, str]:
    """The options that sbatch got for itself."""
    return dict(word[2:].split("=", 1) for word in job[: script(job)] if "=" in word)


def script(job: list[str]) -> int:
    return next(place for place, word in enumerate(job) if word.endswith("launch/slurm.sbatch"))


@pytest.mark.heavy
def test_every_point_becomes_a_job_with_its_own_settings_and_run_folder(sweep: Sweep) -> None:
    words = ("hardware=p4d_24xlarge", "model=30B,13B", "speculation.num_draft_tokens=2,4")
    ended = sweep(*words, "run_dir='a, b'").well()
    configs = [composed(job) for job in ended.jobs]
    assert [(config.model.name, config.speculation.num_draft_tokens, config.run_dir) for config in configs] == [
        ("30B", 2, "a, b/0"),
        ("30B", 4, "a, b/1"),
        ("13B", 2, "a, b/2"),
        ("13B", 4, "a, b/3"),
    ]
    assert [options(job)["output"] for job in ended.jobs] == [f"a, b/{number}/slurm.log" for number in range(4)]
    assert all(Path(f"a, b/{number}").is_dir() for number in range(4))
    assert [options(call)["array"] for call in ended.calls] == ["0,1,2,3"]
    assert "101_0 is job 0" in ended.out
    assert ended.out.count("ms/token plain") == 4


@pytest.mark.heavy
def test_every_setting_of_the_launcher_reaches_sbatch(sweep: Sweep) -> None:
    wanted = {
        "partition": "gpu",
        "account": "me",
        "time": "4:00:00",
        "memory": "64G",
        "gres": "gpu:a100:4",
        "constraint": "nvlink",
        "cpus_per_rank": "8",
        "ranks_per_node": "4",
    }
    [job] = sweep(
        "hardware=p4d_24xlarge",
        "model=7B",
        "draft=tinyllama_1B",
        "hydra.launcher.container=[apptainer,exec]",
        'hydra.launcher.sbatch=["--mail-type=END"]',
        *(f"hydra.launcher.{key}={wanted[key]}" for key in wanted),
    ).jobs
    names = {"memory": "mem", "cpus_per_rank": "cpus-per-task", "ranks_per_node": "ntasks-per-node"}
    assert {names.get(key, key): value for key, value in wanted.items()}.items() <= options(job).items()
    assert options(job)["mail-type"] == "END"
    own = job[script(job) + 1 : job.index("--")]
    assert own[2:] == ["--python", "python", "--prefix", "apptainer", "--prefix", "exec"]


def test_a_prompt_reaches_the_job_as_it_was_typed_which_asks_for_the_gpus_that_it_was_planned_for(sweep: Sweep) -> None:
    prompt = 'it\'s $(rm -rf), "f" [1, {2}] ${x}\\'
    [job] = sweep("hardware=p4d_24xlarge", "model=30B", "hydra.launcher.nodes=2", f"prompt={prompt}").jobs
    assert composed(job).prompt == prompt
    asked = options(job)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gres"]) == ("2", "8", "gpu:8")
    assert "partition" not in asked


@pytest.mark.seconds
def test_a_job_does_not_get_the_settings_that_only_other_points_read(sweep: Sweep) -> None:
    drafted = "speculation.num_draft_tokens=5"
    ended = sweep(CPU, "task=generate", "draft=none,tiny-draft", drafted, "prompt=import").well()
    assert [drafted in job for job in ended.jobs] == [False, True]
    assert "warning: job 0 (" in ended.err
    assert ended.err.count(" has no effect without a draft") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["model=7B"], 2, "name it with hardware=NAME, one of "),
        ([CPU, "seed=0,-1"], 2, "seed=-1 must be between 0"),
        slow([CPU, "prompts=-"], 2, "prompts=- asks at a terminal"),
        (["hardware=p4d_24xlarge", "hydra.launcher.ranks_per_node=9"], 2, "more than the 8 GPUs of a node"),
        slow([CPU, "hydra.launcher.nodes=2"], 2, "does not say how nodes are connected"),
        slow([CPU, "hydra.launcher.sbatch=[evil.sh]"], 2, "would take it for a script"),
        slow([CPU, "hydra.launcher.stage_to=here"], 2, "must be an absolute path"),
        slow([CPU, "hydra.launcher.queue=x"], 2, "hydra.launcher.queue"),
        ([CPU, "hydra.launcher._target_=os.system"], 2, "_target_ is refused"),
        slow([CPU, "hydra.sweeper.max_batch_size=1"], 2, "use hydra.launcher.max_running"),
        heavy(["hardware=g5_12xlarge", "model=7B,65B", "draft=7B"], 3, "job 1 (hardware=g5_12xlarge model=65B"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_queued(
    arguments: list[str], code: int, sentence: str, sweep: Sweep
) -> None:
    ended = sweep(*arguments)
    ended.check_refusal(sentence, code=code)
    assert (ended.jobs, ended.out) == ([], "")


@pytest.mark.heavy
def test_what_the_place_refuses_is_told_with_what_would_work(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(CPU, installed=False).check_refusal("needs sbatch")
    sweep(CPU, multirun=False).check_refusal("add -m")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = sweep(CPU)
    refused.check_refusal("with plain python, on one rank")
    assert refused.calls == []


@pytest.mark.seconds
def test_a_dry_run_shows_every_plan_and_one_table_and_queues_nothing(sweep: Sweep) -> None:
    ended = sweep("hardware=g5_12xlarge", "model=7B,65B", "draft=tinyllama_1B", "dry_run=true", installed=False)
    assert (ended.code, ended.calls, ended.out.count("Memory per rank")) == (3, [], 2)
    assert ended.err.startswith("job 1 (")
    assert "would be queued" not in ended.out, "nothing would"
    table = ended.out.partition("All jobs;")[2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert [(row[0], row[1]) for row in rows] == [("0 model=7B", "yes"), ("1 model=65B", "no"), ("2 jobs", "1 of 2")]
    milliseconds, hours, gpu_hours = (float(text.strip("<")) for text in rows[1][2:])
    assert milliseconds > 0
    assert gpu_hours == pytest.approx(4 * hours, abs=0.02)
    shown = sweep("hardware=p4d_24xlarge", "model=30B", "dry_run=true").out
    [alone] = [line for line in shown.splitlines() if "sbatch" in line]
    assert composed(shlex.split(alone)).model.name == "30B"
    assert "dry_run" not in alone
    assert list(Path().iterdir()) == []


@pytest.mark.heavy
def test_a_job_inherits_nothing_that_describes_the_process_that_submits(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = {"SLURM_NTASKS_PER_NODE", "MASTER_PORT", "RUN_ID", "ROLE_NAME", "LLAMA_SSP_AGENT"}
    kept = {"GROUP_HOME", "LOCAL_SCRATCH", "ROLE_OF_MINE", "MASTER_COPY", "RANKING", "SLURM_CONF"}
    for name in left_out | kept:
        monkeypatch.setenv(name, "3")
    [environment] = sweep(CPU).environments
    assert left_out & set(environment) == set()
    assert kept <= set(environment)


@pytest.mark.heavy
def test_points_that_ask_for_the_same_are_one_array_of_which_so_many_run_at_a_time(sweep: Sweep) -> None:
    words = ["model=7B,13B", "hardware=p4d_24xlarge,8xa100_80gb,g5_12xlarge", "draft=tinyllama_1B"]
    calls = sweep(*words, "hydra.launcher.max_running=2").calls
    asked = [(options(call).get("array"), options(call)["gres"], options(call).get("dependency")) for call in calls]
    assert sorted((array, gpus) for array, gpus, _ in asked) == [("0,1,3,4%2", "gpu:8"), ("2,5%2", "gpu:4")]
    assert [after for _, _, after in asked] == [None, "afterany:101"], "one array after the other"
    ended = sweep(CPU, "seed=0,1", "run_dir='50%, x'")
    assert options(ended.calls[-1])["output"] == "50%%, x/%a/slurm.log"
    assert ended.out.endswith("when they have ended: llama-ssp report '50%, x'\n")
    several = sweep(CPU, "seed=0", "run_dir='a b',c")
    assert several.out.endswith("when they have ended: llama-ssp report 'a b' c --output=DIR\n")
    alone = options(several.calls[-1])
    assert ("array" in alone, alone["job-name"]) == (False, "llama-ssp-1")


@pytest.mark.heavy
def test_a_sweep_that_ends_halfway_names_what_it_has_queued(sweep: Sweep) -> None:
    refused = sweep(CPU, "seed=0,1,2", "run_dir=x,y,y", refusal="y")
    *warnings, error = refused.err.splitlines()
    assert all(line.startswith("warning: points ") for line in warnings)
    assert error.startswith("sbatch refused 6 jobs, 1 to 8, as one array: Batch job submission failed")
    assert refused.err.endswith("; to cancel what is queued already: scancel 101\n")
    Path("x/y").mkdir(parents=True)
    Path("x/y/2").touch()
    full = "run_dir=x/y/2 cannot be made: File exists", "; to cancel what is queued already: scancel 103 104\n"
    sweep(CPU, "run_dir=a,b,x/y").check_refusal(*full)
    long = sweep(CPU, "prompts=null", "too_long=truncate", f"prompt={'x' * 2**17}")
    long.check_refusal("sbatch cannot be started: Argument list too long")
    assert refused.code == 2


@pytest.mark.heavy
def test_weights_are_staged_under_a_name_that_changes_with_them(sweep: Sweep, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for file in shipped("tiny").iterdir():
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


def test_a_job_without_files_has_no_copy(sweep: Sweep) -> None:
    need("synthetic")
    [job] = sweep("model=7B", "weights=synthetic", "hardware=p4d_24xlarge", STAGED[1]).jobs
    assert ("--stage" in job, composed(job).model.path) == (False, None)


@pytest.mark.seconds
def test_a_job_reads_a_copy_instead_of_a_revision_on_the_hub_if_it_is_here(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = put(tmp_path / "hub", "acme/tiny", shipped("tiny").iterdir())
    asked = ("model=acme/tiny", f"model.revision={COMMIT}", *STAGED)
    draft = ("draft=local", "draft.model.hub_id=acme/tiny", "draft.model.revision=main")
    run = composed(sweep(*asked, *draft).well().jobs[0])
    assert run.draft.model
    assert Path(str(run.model.path)).parent == Path(str(run.draft.model.path)).parent == Path("/scratch/of me")
    for weights in snapshot.glob("*.safetensors"):
        weights.unlink()
    absent = sweep(*asked, "draft=none", "task=generate")
    absent.check_refusal(f"not in the hub's cache: hf download acme/tiny --revision {COMMIT}")
    assert len(absent.jobs) == 1


def test_a_sweep_is_submitted_by_one_rank_and_its_jobs_have_a_setting_for_theirs() -> None:
    words = ("-m", "hydra/launcher=slurm")
    assert read_start(words, {}, default=None) == Start(words=[*words], num_ranks=1)
    with pytest.raises(ConfigError, match=r"ranks=8 has no effect on jobs: hydra.launcher.ranks_per_node=8 sets"):
        read_start([*words, "ranks=8"], {}, default=None)


DRY = ("-m", "hydra/launcher=slurm", "dry_run=true")


def test_jobs_read_the_folder_of_options_that_was_given(tmp_path: Path, own_conf: OwnConf) -> None:
    del own_conf  # this user has no folder of their own
    write_all(writer(tmp_path / "conf"))
    words = ("model=mine", "hardware=mybox", "draft=none", "task=generate", "prompt=a", "max_new_tokens=1")
    ended = launch("--config-dir", str(tmp_path / "conf"), *DRY, *words).well()
    assert f" -- --config-dir {tmp_path / 'conf'} " in ended.out


@pytest.mark.heavy
def test_an_installed_program_submits_the_script_and_the_entry_of_its_package(tmp_path: Path) -> None:
    install(tmp_path / "installed")
    (tmp_path / "here").mkdir()
    words = (*DRY, "hardware=8xh100", "model=7B", "draft=none", "task=generate", "prompt=x")
    ended = llama_ssp(tmp_path / "installed", "run", *words, cwd=tmp_path / "here")
    assert ended.returncode == 0, ended.stderr
    package = tmp_path / "installed" / "llama_ssp"
    assert f"{package / 'launch' / 'slurm.sbatch'} --root {package} " in ended.stdout


@pytest.mark.heavy
def test_the_plans_of_jobs_hold_no_control_characters(tmp_path: Path) -> None:
    assert_harmless(launch(*DRY, "hardware=p4d_24xlarge", f"prompt={HOSTILE}", f"run_dir={tmp_path}/run").well())

"""Submits a sweep to a SLURM cluster: checks and plans every point before it queues the first job.

A job is launch/slurm.sbatch with the settings of its point as arguments; no shell ever parses them. Points that ask for
the same resources are the tasks of one job array, whose arguments are in files:

    run_dir/N/job.args    words for launch/slurm.sbatch, each ended by NUL, of the task with index N
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

from llama_ssp import catalogue
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import CapacityError, ConfigError, refuse
from llama_ssp.extensions.slurm.records import SlurmConfig
from llama_ssp.extensions.slurm.tables import print_jobs
from llama_ssp.machines import hardware
from llama_ssp.planning.plan import Plan, require_room
from llama_ssp.ranks.process import AGENT
from llama_ssp.run.commands.points import Point, for_all
from llama_ssp.run.prompts import STANDARD_INPUT
from llama_ssp.run.tasks.dry_run import expected_hours, plan_with_prompts, settings_of_run, show_plan
from llama_ssp.settings import checks
from llama_ssp.settings.launchers import LAUNCHER
from llama_ssp.settings.schema import PlanFormat, RunConfig
from llama_ssp.terminal.unread import complain
from llama_ssp.text.messages import visible

_SCRIPT = catalogue.conf_dir().parent / "launch" / "slurm.sbatch"
# Variables of the submitting process that the job would take for its own. Users have others such as GROUP_HOME.
_PREFIXES_OF_THIS_PROCESS = ("SLURM_", "TORCHELASTIC_")
_OF_THIS_PROCESS = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RUN_ID",
    AGENT,
}
_ARGUMENTS_FILE = "job.args"


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A folder of weights, its copy on every node's own disk, and the config's entry of the model, which gets it."""

    entry: str
    source: Path
    target: Path


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A point with its plan, and the copies that its nodes make first."""

    point: Point
    plan: Plan
    copies: list[_Copy]


def submit_sweep(points: Sequence[Point], settings: SlurmConfig) -> None:
    """Plan all points; submit them if every one fits, and none otherwise or in a dry run.

    Raises:
        CapacityError: points do not fit, and nothing else is wrong.
        ConfigError: names every point that is wrong, or quotes sbatch.
    """
    _check(settings)
    if any(not point.run.hardware for point in points):
        names = ", ".join(hardware.names())
        raise ConfigError(
            "hydra/launcher=slurm plans every job before it is queued, and cannot detect the machine that will run it: "
            f"name it with hardware=NAME, one of {names}"
        )
    jobs = for_all(points, lambda point: _plan(point, settings))
    if any(job.point.run.dry_run for job in jobs):
        _show(jobs, settings)
    for_all([job.point for job in jobs], lambda point: require_room(jobs[point.number].plan, words=_words(point)))
    if not any(job.point.run.dry_run for job in jobs):
        _submit(jobs, settings)


def _check(settings: SlurmConfig) -> None:
    """Refuse settings that are invalid on any cluster; sbatch checks the limits of this one."""
    problems = [
        f"{LAUNCHER}.{name}={value} must be at least 1"
        for name in ("nodes", "ranks_per_node", "cpus_per_rank", "max_running")
        if (value := getattr(settings, name)) is not None and value < 1
    ]
    problems += [
        f"{LAUNCHER}.sbatch has {argument!r}, and sbatch would take it for a script: write --name=value"
        for argument in settings.sbatch
        if not argument.startswith("--") or argument == "--"
    ]
    if settings.stage_to is not None and not settings.stage_to.startswith("/"):
        fault = f"{LAUNCHER}.stage_to={settings.stage_to} must be an absolute path on the nodes"
        problems.append(f"{fault}, for example /scratch/weights")
    refuse(problems)


def _words(point: Point) -> dict[str, str]:
    """Return the names that messages use for settings that a job does not have."""
    return settings_of_run(point.run) | {"hardware.num_nodes": f"{LAUNCHER}.nodes={{}}"}


def _plan(point: Point, settings: SlurmConfig) -> _Job:
    """Plan a point, without the settings that have no effect there, which its job would refuse."""
    run = point.run
    machine = hardware.build(run.hardware)
    if run.prompts == STANDARD_INPUT:
        raise ConfigError("prompts=- asks at a terminal, which a batch job does not have: give prompt= or a file")
    ranks_per_node = settings.ranks_per_node or machine.num_gpus
    if machine.device == "cuda" and ranks_per_node > machine.num_gpus:
        raise ConfigError(
            f"{LAUNCHER}.ranks_per_node={ranks_per_node} is more than the {machine.num_gpus} GPUs of a node of "
            f"hardware={machine.name}"
        )
    world_size = settings.nodes * ranks_per_node
    run, unread = checks.check(run, point.explicit, world_size=world_size, of_sweep=True)
    for found in unread:
        complain(f"warning: {point.name}: {found}")
    point = point.without({found.key for found in unread})
    if settings.nodes > 1 and machine.network is None:
        raise ConfigError(
            f"{LAUNCHER}.nodes={settings.nodes}: hardware={machine.name} does not say how nodes are connected"
        )
    machine = replace(machine, num_gpus=ranks_per_node, num_nodes=settings.nodes)
    plan = plan_with_prompts(run, world_size=world_size, machine=machine)
    return _Job(point=point, plan=plan, copies=list(_copies(run, settings.stage_to)))


def _show(jobs: Sequence[_Job], settings: SlurmConfig) -> None:
    """Print the plan of every job, how all would be queued if they fit, and a table of all."""
    for job in jobs:
        print(visible(f"\n{job.point.name}:"))
        with contextlib.suppress(CapacityError):
            show_plan(job.plan, PlanFormat.full, words=_words(job.point))
    if all(job.plan.fits for job in jobs):
        for group in _arrays(jobs, settings):
            command = _command(group, settings, after=None)
            print(visible(f"\n{_named(group)} would be queued by\n  {shlex.join(command)}"))
    planned = [
        (f"{job.point.number} {job.point.place.settings}".strip(), job.plan, expected_hours(job.point.run, job.plan))
        for job in jobs
    ]
    print()
    print_jobs(planned)


def _arrays(jobs: Sequence[_Job], settings: SlurmConfig) -> list[list[_Job]]:
    """Group the jobs that ask for the same resources and have one folder for their run folders."""

    def asked(job: _Job) -> tuple[str, str]:
        return str(job.point.run_dir.parent), json.dumps(_resources(job, settings))

    return [list(group) for _, group in groupby(sorted(jobs, key=asked), key=asked)]


def _submit(jobs: Sequence[_Job], settings: SlurmConfig) -> None:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "hydra/launcher=slurm needs sbatch: start it on a node of the cluster, or add dry_run=true to see the plans"
        )
    ids: list[str] = []
    for group in _arrays(jobs, settings):
        after = ids[-1] if ids and settings.max_running else None
        try:
            ids.append(_queue(group, _command(group, settings, after=after), settings))
        except ConfigError as error:
            before = f"; to cancel what is queued already: scancel {' '.join(ids)}" if ids else ""
            raise ConfigError(f"{error}{before}") from error
        for job in group:
            task = f"_{job.point.number}" if len(group) > 1 else ""
            print(visible(f"{ids[-1]}{task} is {job.point.name}: {_expected(job.plan)}"), flush=True)
    folders_of_runs = list(dict.fromkeys(str(job.point.run_dir.parent) for job in jobs))
    output = " --output=DIR" if len(folders_of_runs) > 1 else ""
    report = f"llama-ssp report {shlex.join(folders_of_runs)}{output}"
    print(visible(f"{len(jobs)} jobs are queued; when they have ended: {report}"))


def _resources(job: _Job, settings: SlurmConfig) -> dict[str, object]:
    ranks_per_node = job.plan.hardware.num_gpus
    gpus = f"gpu:{ranks_per_node}" if job.plan.hardware.device == "cuda" else None
    return {
        "nodes": settings.nodes,
        "ntasks-per-node": ranks_per_node,
        "cpus-per-task": settings.cpus_per_rank,
        "gres": settings.gres or gpus,
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time,
        "mem": settings.memory,
        "constraint": settings.constraint,
    }


def _command(group: Sequence[_Job], settings: SlurmConfig, *, after: str | None) -> list[str]:
    """Return the command that queues a job, or several as an array, after the job `after`."""
    first = group[0]
    is_array = len(group) > 1
    folder = first.point.run_dir.parent
    log = str(folder).replace("%", "%%") + f"/{'%a' if is_array else first.point.number}/slurm.log"
    at_once = f"%{settings.max_running}" if settings.max_running else ""
    options: dict[str, object] = {
        "job-name": "llama-ssp" if is_array else f"llama-ssp-{first.point.number}",
        "output": log,
        "array": ",".join(str(job.point.number) for job in group) + at_once if is_array else None,
        **_resources(first, settings),
        "dependency": f"afterany:{after}" if after else None,
    }
    return [
        "sbatch",
        "--parsable",
        *(f"--{name}={value}" for name, value in options.items() if value is not None),
        *settings.sbatch,
        str(_SCRIPT),
        *(["--arguments-in", str(folder)] if is_array else _arguments(first, settings)),
    ]


def _arguments(job: _Job, settings: SlurmConfig) -> list[str]:
    """The arguments of launch/slurm.sbatch for a point; nodes first make the copies."""
    own = ["--root", str(_SCRIPT.parents[1])]
    own += ["--python", settings.python or ("python" if settings.container else sys.executable)]
    for word in settings.container:
        own += ["--prefix", word]
    for copy in job.copies:
        own += ["--stage", str(copy.source), str(copy.target)]
    return [*own, "--", *_settings_of_job(job.point, job.copies)]


def _named(group: Sequence[_Job]) -> str:
    first, last = group[0].point, group[-1].point
    return first.name if first is last else f"{len(group)} jobs, {first.number} to {last.number}, as one array"


def _settings_of_job(point: Point, copies: Sequence[_Copy]) -> list[str]:
    """The point's settings as a user would type them, without dry_run; the prompt literally, the rest quoted."""
    replaced = {"run_dir": str(point.run_dir)} | {f"{copy.entry}.path": str(copy.target) for copy in copies}
    left_out = {"run_dir", "prompt", "dry_run"}
    left_out |= {f"{copy.entry}.{name}" for copy in copies for name in ("path", "hub_id", "revision")}
    kept = [setting for setting in point.settings if setting.partition("=")[0] not in left_out]
    if point.run.prompt is not None:
        kept.append(f"prompt={point.run.prompt}")
    folder = catalogue.given_folder()
    options = ["--config-dir", str(folder)] if folder else []
    return [*options, *kept] + [
        f"{key}={QuotedString(text=text, quote=Quote.single).with_quotes()}" for key, text in replaced.items()
    ]


def _queue(group: Sequence[_Job], command: Sequence[str], settings: SlurmConfig) -> str:
    """Make the run folders, with the arguments of an array's tasks, and queue them; returns the job's id."""
    for job in group:
        folder = job.point.run_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if len(group) > 1:
                words = "".join(f"{word}\0" for word in _arguments(job, settings))
                (folder / _ARGUMENTS_FILE).write_bytes(os.fsencode(words))
        except OSError as error:
            raise ConfigError(f"run_dir={folder} cannot be made: {error.strerror}") from error
    ours = {name for name in os.environ if name in _OF_THIS_PROCESS or name.startswith(_PREFIXES_OF_THIS_PROCESS)}
    outside = {name: value for name, value in os.environ.items() if name not in ours - {"SLURM_CONF"}}
    try:
        done = subprocess.run(command, env=outside, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"sbatch cannot be started: {error.strerror}") from error
    if done.returncode:
        reason = " ".join(done.stderr.removeprefix("sbatch: error: ").split())
        raise ConfigError(f"sbatch refused {_named(group)}: {reason}")
    return done.stdout.strip().partition(";")[0]


def _expected(plan: Plan) -> str:
    timed = plan.timing
    fast = "" if timed.speculative_s is None else f", {1e3 * timed.speculative_s:.2f} speculative"
    return f"{plan.fullest.room} on the fullest rank, {1e3 * timed.plain_s:.2f} ms/token plain{fast}"


def _copies(run: RunConfig, folder: str | None) -> Iterator[_Copy]:
    """Name the copies of target and draft below `folder`, except of weights that are shipped or made by the run.

    launch/slurm.sbatch makes them. Raises ConfigError without weights.
    """
    if folder is None or not run.reads_files:
        return
    for entry, model in (("model", run.model), ("draft.model", run.draft.model)):
        if model is not None and (model.path is not None or not model.shipped):
            source = _weights_here(model)
            files = sorted(file for file in source.rglob("*") if file.is_file())
            # A copy is made once and then trusted.
            facts = repr([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])
            name = model.name.replace("/", "--")  # an id of the hub
            target = Path(folder) / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
            yield _Copy(entry=entry, source=source, target=target)


def _weights_here(model: ModelConfig) -> Path:
    """Return the model's folder, or its snapshot in the hub's cache; never downloads."""
    from llama_ssp.weights import hub

    folder = hub.folder_here(model)
    if model.path is not None and folder and not folder.is_dir():
        raise ConfigError(f"{model.path} is not a folder: the weights of model {model.name} cannot be copied from it")
    # Planning may have downloaded config.json alone.
    if model.path is None and not (folder and any(folder.glob(hub.WEIGHTS))):
        raise ConfigError(
            f"staging copies local weights, and {model.hub_id} is not in the hub's cache: {hub.download_command(model)}"
        )
    assert folder
    return folder.resolve() if model.path is not None else folder

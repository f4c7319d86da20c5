"""Submits a sweep to a SLURM cluster: checks and plans every point before it queues the first job.

Hydra composes the points (`hydra_plugins.slurm_launcher`). A job is launch/slurm.sbatch with the settings of its point
as arguments; no shell ever parses them.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

from llama_ssp.commands.staging import Copy, stage
from llama_ssp.config import checks, hardware, slurm
from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.options import folders
from llama_ssp.config.plan import PlanFormat
from llama_ssp.config.schema import RunConfig
from llama_ssp.config.slurm import KEY, SlurmConfig
from llama_ssp.console.unread import complain
from llama_ssp.errors import CapacityError, ConfigError, SspError, one_message
from llama_ssp.planning.plan import Plan, require_room
from llama_ssp.session.prompt_files import STANDARD_INPUT
from llama_ssp.tasks.dry_run import job_ahead, plan_job, settings_of_run, show_plan
from llama_ssp.visible import visible

SCRIPT = folders.conf_dir().parent / "launch" / "slurm.sbatch"
# Variables of the submitting process that the job would take for its own.
_OF_THIS_PROCESS = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "RUN_ID")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One job of a sweep: its number from 0, its overrides, the config they compose to, and the keys that they set."""

    number: int
    settings: tuple[str, ...]
    run: RunConfig
    explicit: frozenset[str]

    @property
    def run_dir(self) -> Path:
        """Its run folder, inside the folder of the sweep."""
        return Path(str(self.run.run_dir)) / str(self.number)

    def without(self, keys: Container[str]) -> "Point":
        """The same point, as if these keys had not been set."""
        kept = tuple(setting for setting in self.settings if setting.partition("=")[0] not in keys)
        return replace(self, settings=kept, run=replace(self.run, prompt=None) if "prompt" in keys else self.run)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"job {self.number} ({' '.join(self.settings)})"


def submit_sweep(points: Sequence[Point], settings: SlurmConfig) -> None:
    """Plan all points; submit them if every one fits, and none otherwise or in a dry run.

    Raises:
        CapacityError: points do not fit, and nothing else is wrong.
        ConfigError: names every point that is wrong, or quotes sbatch.
    """
    slurm.check(settings)
    if any(not point.run.hardware for point in points):
        names = ", ".join(hardware.names())
        raise ConfigError(
            "hydra/launcher=slurm plans every job before it is queued, and cannot detect the machine that will run it: "
            f"name it with hardware=NAME, one of {names}"
        )
    problems, misfits, planned = [], [], []
    for point in points:
        try:
            read, plan = _plan(point, settings)
            planned.append((read, plan, stage(read.run, settings.stage_to)))
        except CapacityError as error:
            misfits.append(f"{point.name}: {error}")
        except SspError as error:
            problems.append(f"{point.name}: {error}")
    if problems:
        raise ConfigError(one_message([*problems, *misfits]))
    if misfits:
        raise CapacityError(one_message(misfits))
    _submit(planned, settings)


def _plan(point: Point, settings: SlurmConfig) -> tuple[Point, Plan]:
    """Return the point without the settings that have no effect there, which its job would refuse, and its plan."""
    run = point.run
    if problems := hardware.problems_of(run.hardware):
        raise ConfigError(one_message(problems))
    if run.prompts == STANDARD_INPUT:
        raise ConfigError("prompts=- asks at a terminal, which a batch job does not have: give prompt= or a file")
    machine = hardware.build(run.hardware)
    ranks_per_node = settings.ranks_per_node or machine.num_gpus
    if machine.device == "cuda" and ranks_per_node > machine.num_gpus:
        raise ConfigError(
            f"{KEY}.ranks_per_node={ranks_per_node} is more than the {machine.num_gpus} GPUs of a node of "
            f"hardware={machine.name}"
        )
    world_size = settings.nodes * ranks_per_node
    unread = checks.check(run, point.explicit, world_size=world_size, of_sweep=True)
    for each in unread:
        complain(f"warning: {point.name}: {each}")
    point = point.without({each.key for each in unread})
    job, _ = job_ahead(run, world_size=world_size)
    machine = _nodes_of(machine, settings, ranks_per_node)
    plan = plan_job(job, machine, auto_ranks=world_size if run.placement.auto else None)
    words = settings_of_run(run) | {"hardware.num_nodes": f"{KEY}.nodes={{}}"}
    if run.dry_run:
        print(visible(f"\n{point.name}:"))
        show_plan(plan, PlanFormat.table, words=words)
    require_room(plan, words=words)
    return point, plan


def _nodes_of(machine: HardwareConfig, settings: SlurmConfig, ranks_per_node: int) -> HardwareConfig:
    if settings.nodes > 1 and machine.network is None:
        raise ConfigError(f"{KEY}.nodes={settings.nodes}: hardware={machine.name} does not say how nodes are connected")
    return replace(machine, num_gpus=ranks_per_node, num_nodes=settings.nodes)


def _submit(planned: Sequence[tuple[Point, Plan, list[Copy]]], settings: SlurmConfig) -> None:
    """Queue all points, or in a dry run print how they would be queued."""
    queue = not any(point.run.dry_run for point, _, _ in planned)
    if queue and shutil.which("sbatch") is None:
        raise ConfigError(
            "hydra/launcher=slurm needs sbatch: start it on a node of the cluster, or add dry_run=true to see the plans"
        )
    ids: list[str] = []
    for place, (point, plan, copies) in enumerate(planned):
        throttle = settings.max_running or len(planned)
        after = ids[place - throttle] if queue and place >= throttle else None
        command = sbatch_command(point, settings, plan=plan, copies=copies, after=after)
        if queue:
            ids.append(_queue(command, point, ids))
            print(visible(f"{ids[-1]} is {point.name}: {_expected(plan)}"), flush=True)
        else:
            print(visible(f"\n{point.name} would be queued by\n  {shlex.join(command)}"))
    if queue:
        folder = planned[0][0].run_dir.parent
        report = f"llama-ssp report {shlex.quote(str(folder))}"
        print(visible(f"{len(ids)} jobs are queued; when they have ended: {report}"))


def sbatch_command(
    point: Point, settings: SlurmConfig, *, plan: Plan, copies: Sequence[Copy], after: str | None
) -> list[str]:
    """Return the command that queues a point after the job `after`; nodes first make the `copies`."""
    ranks_per_node = plan.hardware.num_gpus
    gpus = f"gpu:{ranks_per_node}" if plan.hardware.device == "cuda" else None
    options: Mapping[str, object] = {
        "job-name": f"llama-ssp-{point.number}",
        "output": str(point.run_dir / "slurm.log").replace("%", "%%"),
        "nodes": settings.nodes,
        "ntasks-per-node": ranks_per_node,
        "cpus-per-task": settings.cpus_per_rank,
        "gres": settings.gres or gpus,
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time,
        "mem": settings.memory,
        "constraint": settings.constraint,
        "dependency": f"afterany:{after}" if after else None,
    }
    own = ["--root", str(SCRIPT.parents[1])]
    own += ["--python", settings.python or ("python" if settings.container else sys.executable)]
    for word in settings.container:
        own += ["--prefix", word]
    for copy in copies:
        own += ["--stage", str(copy.source), str(copy.target)]
    return [
        "sbatch", "--parsable",
        *(f"--{name}={value}" for name, value in options.items() if value is not None),
        *settings.sbatch, str(SCRIPT), *own, "--",
        *_settings_of_job(point, copies),
    ]  # fmt: skip


def _settings_of_job(point: Point, copies: Sequence[Copy]) -> list[str]:
    """The point's settings as a user would type them, without dry_run; the prompt literally, the rest quoted."""
    replaced = {"run_dir": str(point.run_dir)} | {copy.key: str(copy.target) for copy in copies}
    kept = [setting for setting in point.settings if setting.partition("=")[0] not in {*replaced, "prompt", "dry_run"}]
    if point.run.prompt is not None:
        kept.append(f"prompt={point.run.prompt}")
    folder = folders.given_folder()
    options = ["--config-dir", str(folder)] if folder else []
    return [*options, *kept] + [
        f"{key}={QuotedString(text=text, quote=Quote.single).with_quotes()}" for key, text in replaced.items()
    ]


def _queue(command: Sequence[str], point: Point, queued: Sequence[str]) -> str:
    try:
        point.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={point.run_dir} cannot be made: {error.strerror}") from error
    outside = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(_OF_THIS_PROCESS)
    }
    done = subprocess.run(command, env=outside, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.removeprefix("sbatch: error: ").split())
        before = f"; queued already, and cancelled by: scancel {' '.join(queued)}" if queued else ""
        raise ConfigError(f"sbatch refused {point.name}: {reason}{before}")
    return done.stdout.strip().partition(";")[0]


def _expected(plan: Plan) -> str:
    full, timed = plan.fullest, plan.timing
    room = f"{full.needed_bytes / 2**30:.1f} of {full.capacity_bytes / 2**30:.1f} GiB on the fullest rank"
    plain = f"{1e3 * timed.plain_s:.2f} ms/token plain"
    if timed.speculative_s is None:
        return f"{room}, {plain}"
    return f"{room}, {plain}, {1e3 * timed.speculative_s:.2f} speculative"

"""A run from its checked config to its last record: the same program on every rank.

    open the run folder -> check checkpoints -> read prompts -> forecast -> load -> do the task -> summary and table

Ranks agree after each step that can fail, so that no rank waits for one that has failed.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import transformers

from llama_ssp.errors import ConfigError, InterruptedRun, LostRankError, SspError
from llama_ssp.planning.advice import slower_overlapped
from llama_ssp.planning.plan import Plan, require_room
from llama_ssp.ranks.failures import Phase, raise_on_all_ranks, unify_failure
from llama_ssp.ranks.gpu.watchdog import guard
from llama_ssp.ranks.world import World, start
from llama_ssp.reports.folder import RunFolder, read_status, write_failure
from llama_ssp.reports.provenance import git_commit, gpu_links, versions
from llama_ssp.run.checkpoints import find_sources, offload_folder, with_number_formats
from llama_ssp.run.decoders import load_models
from llama_ssp.run.interruption import interruptible, stopping_on_signals
from llama_ssp.run.jobs import JobMaker, PromptTask
from llama_ssp.run.prompts import Prompt, is_interactive, read_prompts
from llama_ssp.run.ranklog import close_logs, describe_rank, open_logs
from llama_ssp.run.results import finalize, pass_gate
from llama_ssp.run.resuming import check_lines, check_models
from llama_ssp.run.session import Session
from llama_ssp.run.startup import StartClock
from llama_ssp.run.tasks import dry_run
from llama_ssp.settings.registry import imported
from llama_ssp.settings.schema import (
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    RunConfig,
    TargetPlacement,
    WholeParts,
    to_yaml,
)
from llama_ssp.settings.tasks import task_of
from llama_ssp.terminal.terminal import Terminal
from llama_ssp.terminal.unread import complain

Task: TypeAlias = Callable[[Session, list[PromptTask]], None]
"""A task with loaded models, the same on every rank, for all jobs or for those of one typed prompt.

It raises InterruptedRun on every rank if stopped.
"""
MachineTask: TypeAlias = Callable[[RunConfig, World, Terminal], str | None]
"""A task without models, the same on every rank; returns the closing message for the user."""

_TYPING_PATIENCE_S = 24 * 3600.0
_log = logging.getLogger(__name__)


def run(config: RunConfig, clock: StartClock) -> bool:
    """Run a checked config, the same on every rank.

    Returns whether somebody stopped the run too late for its task, the same on every rank: a sweep must end here.
    Raises SspError on every rank alike; rank 0 also writes it to the run folder's `status`.
    """
    clock.reach("imported_s")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with _joined(config, clock) as (world, terminal, folder, phase):
        task, setting = task_of(config), f"task={config.task.name}"
        if not task.needs_models:
            do_alone: MachineTask = imported(task.run, setting=setting)
            if message := do_alone(config, world, terminal):
                terminal.say(message)
            return False
        do_task: Task = imported(task.run, setting=setting)
        session, jobs = _load(config, world, terminal, folder, phase=phase, clock=clock)

        def agree(stops: bool) -> bool:
            return any(world.comm.gather_text("stop" if stops else ""))

        interruption = None
        try:
            heeding = stopping_on_signals(session.stop_request, tell=world.watch.ask_to_stop, agree=agree)
            with heeding as stop, terminal.while_read(stop):
                if jobs is None:
                    _converse(session, do_task)
                else:
                    do_task(session, jobs)
        except InterruptedRun as error:
            interruption = error
        finalize(session)
        if interruption:
            raise interruption
        pass_gate(session)
        if folder:
            folder.write_status("done")
        return session.stop_request.requested


@contextmanager
def _joined(config: RunConfig, clock: StartClock) -> Iterator[tuple[World, Terminal, RunFolder | None, Phase]]:
    """Join the other ranks, open the run folder, and write to it how the block failed."""
    joining = start(device=config.device, timeout_s=config.timeouts.load_s)
    with joining as world, ExitStack() as stack:
        clock.reach("joined_s")
        terminal = Terminal.of_rank(world.comm.rank)
        if world.note:
            terminal.say(world.note)
        phase = Phase(doing="loading", limit=f"timeouts.load_s={config.timeouts.load_s:g}")
        folder: RunFolder | None = None
        run_dir: Path | None = None

        def record(error: Exception | KeyboardInterrupt) -> None:
            if run_dir:
                with suppress(SspError):  # a full disk must not hide the reason
                    _write_end(run_dir, folder, error)

        def report(error: SspError) -> None:
            record(error)
            if error.speaks:
                complain(str(error))

        try:
            with (
                unify_failure(world.watch, phase),
                guard(world.watch, world.comm.device_wait, phase, report=report),
            ):
                if task_of(config).needs_models:
                    folder = _open_folder(config, world, stack)
                    stack.callback(shutil.rmtree, offload_folder(config, world), ignore_errors=True)
                    run_dir = Path(str(config.run_dir))
                    _log_ranks(world, folder)
                yield world, terminal, folder, phase
        except (Exception, KeyboardInterrupt) as error:
            record(error)
            raise


def _open_folder(config: RunConfig, world: World, stack: ExitStack) -> RunFolder | None:
    """Open the run folder on rank 0, and a log in it on every rank."""
    folder = None
    with raise_on_all_ranks(world.comm):
        if world.comm.rank == 0:
            folder = stack.enter_context(RunFolder(Path(str(config.run_dir)), to_yaml(config)))
    config.run_dir = world.comm.broadcast_text(str(config.run_dir), src=0)
    open_logs(Path(config.run_dir), rank=world.comm.rank)
    stack.callback(close_logs)
    return folder


def _log_ranks(world: World, folder: RunFolder | None) -> None:
    ranks = world.comm.gather_text(describe_rank(world))
    for rank in ranks if folder else [ranks[world.comm.rank]]:
        _log.info("%s", rank)
    if folder:
        made_by = versions() | {"commit": git_commit()}
        _log.info(", ".join(f"{name} {version}" for name, version in made_by.items()))
        _log.info("links between GPUs: %s", gpu_links() if world.device.type == "cuda" else "none, ranks are on CPUs")


def _write_end(run_dir: Path, folder: RunFolder | None, error: Exception | KeyboardInterrupt) -> None:
    """Write the status: rank 0 does, or if it may be lost, the rank that reports the error."""
    if isinstance(error, LostRankError):
        if read_status(run_dir) not in {"running", f"{error.exit_code}: {error}"}:
            error.speaks = False  # this rank was paused, and the others have already reported its loss
        elif folder or error.speaks:
            write_failure(run_dir, exit_code=error.exit_code, sentence=str(error))
    elif folder and isinstance(error, InterruptedRun | KeyboardInterrupt):
        folder.write_status("interrupted")
    elif folder and isinstance(error, SspError):
        write_failure(run_dir, exit_code=error.exit_code, sentence=str(error))
    elif folder:  # an unexpected error: Python prints its traceback and exits with 1
        message = str(error).strip().partition("\n")[0]
        write_failure(run_dir, exit_code=1, sentence=f"{type(error).__name__}: {message}")


def _load(
    config: RunConfig, world: World, terminal: Terminal, folder: RunFolder | None, *, phase: Phase, clock: StartClock
) -> tuple[Session, list[PromptTask] | None]:
    """Read the prompts, forecast the run and load its models; jobs are None if prompts are typed one by one."""
    if config.placement.auto:
        _choose_placement(config, world, terminal)
    sources = find_sources(config, world)
    config = with_number_formats(config, sources)
    with raise_on_all_ranks(world.comm):
        if folder:
            check_models(folder, sources, config)
    task, folders = task_of(config), [source.origin.folder for source in sources if source]
    if task.check_files:
        check_files = imported(task.check_files, setting=f"task={task.name}")
        check_files(config, folders, world_size=world.comm.size)
    known = json.dumps(sorted(folder.finished)) if folder else ""
    keys = json.loads(world.comm.broadcast_text(known, src=0))
    finished = frozenset((index, mode, sample) for index, mode, sample in keys)
    target = sources[0]
    maker = JobMaker(
        tokenizer=target.tokenizer, context=min(source.origin.context for source in sources if source),
        vocab_size=target.origin.shape.vocab_size,
    )  # fmt: skip
    jobs = _read_jobs(config, world, folder, maker)
    config = dry_run.with_filled_rows(config, num_completions=len(jobs) if jobs else config.num_samples)
    plan = _make_plan(config, world, terminal, jobs)
    clock.reach("checked_s")
    with terminal.loading() as progress:
        models = load_models(config, world, sources, progress=progress)
    clock.reach("loaded_s")
    phase.doing, phase.limit = "decoding", f"timeouts.decode_s={config.timeouts.decode_s:g}"
    num_prompts = None if jobs is None else len({job.request.index for job in jobs})
    session = Session(
        config, world=world, models=models, terminal=terminal, folder=folder, finished=finished,
        num_prompts=num_prompts, plan=plan, start_clock=clock,
    )  # fmt: skip
    return session, jobs


def _choose_placement(config: RunConfig, world: World, terminal: Terminal) -> None:
    """Let rank 0 choose for all ranks: nodes may differ in what they know of the machine."""
    choice = ""
    with raise_on_all_ranks(world.comm):
        if world.comm.rank == 0:
            chosen = dry_run.choose_for_run(config, world_size=world.comm.size, on_cpu=world.device.type == "cpu")
            terminal.say(chosen.sentence)
            job = chosen.job
            choice = json.dumps([job.target_ranks, job.draft_ranks, job.draft_kind.name, job.draft_whole.name])
    target_ranks, draft_ranks, kind, whole = json.loads(world.comm.broadcast_text(choice, src=0))
    config.placement = PlacementConfig(
        target=TargetPlacement(ranks=target_ranks),
        draft=DraftPlacement(kind=DraftLayout[kind], ranks=draft_ranks or None, whole=WholeParts[whole]),
        num_replicas=config.placement.num_replicas,
    )


def _read_jobs(config: RunConfig, world: World, folder: RunFolder | None, maker: JobMaker) -> list[PromptTask] | None:
    """Read and encode the prompts, the same on every rank; None if they will be typed one by one."""
    records: list[dict[str, Any]] | None = None
    with raise_on_all_ranks(world.comm):
        if folder:
            read = None if is_interactive(config) else read_prompts(config)
            check_lines(folder.lines, config, read)
            records = None if read is None else [asdict(prompt) for prompt in read]
    records = json.loads(world.comm.broadcast_text(json.dumps(records), src=0))
    if records is None:
        return None
    with raise_on_all_ranks(world.comm):
        return maker.jobs([Prompt.from_dict(record) for record in records], config)


def _make_plan(config: RunConfig, world: World, terminal: Terminal, jobs: list[PromptTask] | None) -> Plan | None:
    """Plan this run; None for an unknown machine. Raises CapacityError if it cannot fit."""
    with raise_on_all_ranks(world.comm):
        try:
            machine = dry_run.hardware_of(config, on_cpu=world.device.type == "cpu")
        except ConfigError as error:
            if config.hardware:
                raise
            terminal.say(f"no forecast: {error}")
            return None
        if not config.hardware and machine.device == "cuda":  # nvidia-smi lists the GPUs that this rank sees
            machine = replace(machine, num_gpus=max(machine.num_gpus, world.ranks.local_size))
        lengths = [len(job.request.prompt_ids) for job in jobs] if jobs else [dry_run.TYPED_TOKENS]
        plan = dry_run.plan_of_run(config, world_size=world.comm.size, machine=machine, lengths=lengths)
        if world.comm.rank == 0:
            link = machine.link
            source = next(filter(None, map(machine.sources.get, ("link", "link.bandwidth_bytes_per_s"))), "no source")
            _log.info("forecast for hardware %s: links of %.4g GB/s and %.3g us (%s)", machine.name,
                      link.bandwidth_bytes_per_s / 1e9, 1e6 * link.latency_s, source)  # fmt: skip
        require_room(plan, words=dry_run.settings_of_run(config))
        for warning in slower_overlapped(plan.job, plan.hardware, plan.timing):
            terminal.say(f"warning: {warning}")
    return plan


def _converse(session: Session, complete: Task) -> None:
    """Ask for a prompt and `complete` it until Ctrl-D or Ctrl-C; a resumed folder continues its numbering."""
    comm, config, maker = session.world.comm, session.config, session.models.job_maker
    index = 1 + max((index for index, _, _ in session.finished), default=-1)
    asked = _recorded_prompts(session)
    typed = session.terminal.ask() if comm.rank == 0 else iter(())
    while True:
        comm.set_timeout(_TYPING_PATIENCE_S)
        text = None
        with interruptible(), suppress(KeyboardInterrupt):
            text = next(typed, None)
        text = json.loads(comm.broadcast_text(json.dumps(text), src=0))
        comm.set_timeout(config.timeouts.decode_s)
        if text is None:
            return
        whole = [*asked, Prompt(text=text)]
        try:
            jobs = maker.jobs(whole, config, first_index=index - len(asked))
        except ConfigError as error:
            session.terminal.say(str(error))
            continue
        asked = whole
        complete(session, [job for job in jobs if job.request.index == index])
        index += 1


def _recorded_prompts(session: Session) -> list[Prompt]:
    """The prompts of the folder, the same on every rank, since equal ones are counted."""
    by_index = {line.index: line.prompt for line in session.folder.lines} if session.folder else {}
    texts = [by_index[index] for index in sorted(by_index)]
    return [Prompt(text=text) for text in json.loads(session.world.comm.broadcast_text(json.dumps(texts), src=0))]

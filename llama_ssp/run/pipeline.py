"""A run from its checked config to its last record: the same program on every rank.

    open the run folder -> check checkpoints -> read prompts -> forecast -> load -> do the task -> summary and table

Ranks agree after each step that can fail, so that no rank waits for one that has failed.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import transformers

from llama_ssp.errors import ConfigError, InterruptedRun
from llama_ssp.machines.machine import keep_speeds, note_on_links, speeds_are_due
from llama_ssp.planning.notes import outgrown, slower_overlapped
from llama_ssp.planning.plan import Plan, require_room
from llama_ssp.ranks.cores import CoreTimes, used_by_others
from llama_ssp.ranks.failures import Phase, from_rank_0, raise_on_all_ranks
from llama_ssp.ranks.memory import MemoryWatch
from llama_ssp.ranks.world import World
from llama_ssp.registry import imported
from llama_ssp.reports.folder import RunFolder
from llama_ssp.run.checkpoints import Source, find_sources, with_number_formats
from llama_ssp.run.decoders import load_models
from llama_ssp.run.generation import note_on, with_ids, with_model_sampling
from llama_ssp.run.interruption import interruptible, stopping_on_signals
from llama_ssp.run.lengths import named
from llama_ssp.run.log_probs import record_log_probs
from llama_ssp.run.opening import joined
from llama_ssp.run.prompts import Prompt, is_interactive, read_prompts
from llama_ssp.run.requests import PromptRequest, RequestMaker
from llama_ssp.run.results import finalize, pass_gate
from llama_ssp.run.resuming import check_lines, check_models, check_texts
from llama_ssp.run.session import Session
from llama_ssp.run.slowness import Surroundings
from llama_ssp.run.startup import StartClock
from llama_ssp.run.tasks import dry_run
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.schema import DraftLayout, DraftPlacement, PlacementConfig, RunConfig, TargetPlacement
from llama_ssp.settings.tasks import request_file, task_of
from llama_ssp.terminal.terminal import Terminal

Task: TypeAlias = Callable[[Session, list[PromptRequest]], None]
"""A task with loaded models, the same on every rank, for all requests or for the ones of a typed prompt.

It raises InterruptedRun on every rank if stopped.
"""
MachineTask: TypeAlias = Callable[[RunConfig, World, Terminal], str | None]
"""A task without models, the same on every rank; returns the closing message for the user."""

_TYPING_PATIENCE_S = 24 * 3600.0
_log = logging.getLogger(__name__)


def run(config: RunConfig, clock: StartClock) -> bool:
    """Run a checked config, the same on every rank.

    Returns whether a stop came too late for its task, the same on every rank: a sweep must then end after this point.
    Raises SspError on every rank alike; rank 0 also writes it to the run folder's `status`.
    """
    clock.reach("imported_s")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # DeepSpeed, where it is installed, logs to standard output, which is reserved for texts.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    with joined(config, clock) as (world, terminal, folder, phase):
        if place := config.place:
            _log.info("%s", place.title)
            terminal.point(place.title, is_first=place.number == 1)
        task, setting = task_of(config), f"task={config.task.name}"
        if not task.needs_models:
            do_alone: MachineTask = imported(task.run, setting=setting)
            if message := do_alone(config, world, terminal):
                terminal.say(message)
            return False
        do_task: Task = imported((request_file(config) or task).run, setting=setting)
        session, requests = _load(config, world, terminal, folder, phase=phase, clock=clock)
        interruption = None
        try:
            with stopping_on_signals(session.stop_request, world) as stop, terminal.while_read(stop):
                if requests is None:
                    _converse(session, do_task)
                else:
                    do_task(session, requests)
                    if session.config.scores_texts:
                        record_log_probs(session, requests)
        except InterruptedRun as error:
            interruption = error
        finalize(session)
        if interruption:
            raise interruption
        pass_gate(session)
        phase.go_on("ending", limit=f"timeouts.load_s={config.timeouts.load_s:g}")
        world.comm.set_timeout(config.timeouts.load_s)  # rank 0 may still write reports
        with raise_on_all_ranks(world.comm):  # a rank that waits here writes how the run failed if rank 0 is killed
            if folder:
                folder.write_status("done")
        return session.stop_request.requested


def _load(
    config: RunConfig, world: World, terminal: Terminal, folder: RunFolder | None, *, phase: Phase, clock: StartClock
) -> tuple[Session, list[PromptRequest] | None]:
    """Read the prompts, forecast the run and load its models; requests are None if prompts are typed one by one."""
    if config.placement.auto:
        config = replace(config, placement=choose_placement(config, world, terminal.say))
    sources = find_sources(config, world)
    config, generation = with_number_formats(config, sources), sources[0].generation
    with raise_on_all_ranks(world.comm):
        config = _checked(config, sources, folder)
    task, folders = task_of(config), [source.origin.folder for source in sources if source]
    if task.check_files:
        check_files = imported(task.check_files, setting=f"task={task.name}")
        check_files(config, folders, world_size=world.comm.size)
    keys = from_rank_0(world.comm, lambda: sorted(folder.finished) if folder else [])
    finished = frozenset(map(tuple, keys))
    target = sources[0]
    maker = RequestMaker(
        tokenizer=target.tokenizer, context=target.origin.context, vocab_size=target.origin.shape.vocab_size
    )
    requests = _read_requests(config, world, terminal, folder, maker)
    if note := note_on(config.sampling, generation or {}):
        terminal.say(note)
    if requests != []:  # requests of a task or a file without prompts fill all rows
        config = dry_run.with_filled_rows(config, num_completions=len(requests) if requests else config.num_samples)
    plan = _make_plan(config, world, terminal, requests)
    if (placed := config.placement.target).stages > 1 and placed.groups is None:
        (groups,) = from_rank_0(world.comm, lambda: [plan.num_groups if plan else 1])
        config = replace(config, placement=replace(config.placement, target=replace(placed, groups=groups)))
    clock.reach("checked_s")
    memory = MemoryWatch(world.device)
    with terminal.loading() as progress, memory.closely():
        models = load_models(config, world, sources, progress=progress)
    clock.reach("loaded_s")
    if models.draft_context and config.draft.model:
        lengths = [len(request.prompt_ids) + request.max_new_tokens for request in requests or ()]
        longest = max(lengths, default=models.context)
        said = outgrown(config.draft.model.name, models.draft_context, config.most_steps, longest=longest)
        if said:
            terminal.say(said)
    phase.go_on("decoding", limit=f"timeouts.decode_s={config.timeouts.decode_s:g}")
    num_prompts = None if requests is None else len({request.index for request in requests})
    session = Session(
        config,
        world=world,
        models=models,
        terminal=terminal,
        folder=folder,
        finished=finished,
        num_prompts=num_prompts,
        plan=plan,
        start_clock=clock,
        memory=memory,
    )
    return session, requests


def _checked(config: RunConfig, sources: tuple[Source, Source | None], folder: RunFolder | None) -> RunConfig:
    """Fill in and check the settings that depend on the models' files, and check that the folder's records fit them.

    Takes over the plain completions of the config's baseline, if it has one. Raises ConfigError.
    """
    target = sources[0]
    sampling = with_model_sampling(config.sampling, target.generation)
    vocab_size = target.origin.shape.vocab_size
    sampling = with_ids(sampling, target.tokenizer, eos_ids=target.eos_ids, vocab_size=vocab_size)
    config = replace(config, sampling=sampling)
    check_values(config)
    if folder:
        check_models(folder, sources, config)
        folder.check_log_probs(config.logprobs, config.prompt_logprobs)
        if config.place and config.place.baseline:
            folder.take_over(Path(config.place.baseline))
    return config


def choose_placement(config: RunConfig, world: World, say: Callable[[str], None]) -> PlacementConfig:
    """Let rank 0 choose for all ranks: nodes may know different facts of the machine."""

    def choose() -> list[object]:
        spec, sentence = dry_run.choose_for_run(config, world_size=world.comm.size, on_cpu=world.device.type == "cpu")
        say(sentence)
        return [spec.target_ranks, spec.num_stages, spec.draft_ranks, spec.draft_kind.name]

    target_ranks, num_stages, draft_ranks, kind = from_rank_0(world.comm, choose)
    return PlacementConfig(
        target=TargetPlacement(ranks=target_ranks, stages=num_stages),
        draft=DraftPlacement(kind=DraftLayout[kind], ranks=draft_ranks or None),
        num_replicas=config.placement.num_replicas,
    )


def _read_requests(
    config: RunConfig, world: World, terminal: Terminal, folder: RunFolder | None, maker: RequestMaker
) -> list[PromptRequest] | None:
    """Read and encode the prompts, the same on every rank; None if they will be typed one by one."""
    if not task_of(config).reads_prompts(config):
        return []

    def read() -> list[dict[str, object]] | None:
        if (types := is_interactive(config)) and config.scores_texts:
            raise ConfigError("logprobs= scores the texts of prompts that are given: use prompt=TEXT or prompts=FILE")
        prompts = None if types else read_prompts(config)
        if folder:
            check_lines(folder.lines, config, prompts)
            check_texts(folder.lines, config, prompts, maker)
        return None if prompts is None else [asdict(prompt) for prompt in prompts]

    records = from_rank_0(world.comm, read)
    if records is None:
        return None
    with raise_on_all_ranks(world.comm):
        prompts = [Prompt(**record) for record in records]
        requests = maker.requests(prompts, config)
        kept = {request.index for request in requests}
        if left_out := [prompt for index, prompt in enumerate(prompts) if index not in kept]:
            sentence = f"too long for the context, and left out: {named(left_out)}"
            if not requests:
                raise ConfigError(f"{sentence}; no prompt is left, and too_long=truncate keeps the end of each")
            terminal.say(sentence)
    return requests


def _measure_once(world: World) -> None:
    """Measure the products of a CPU without calibration, on its first run: a few seconds."""
    if from_rank_0(world.comm, speeds_are_due):
        from llama_ssp.run.calibration import cpu_speeds, rank_0_alone

        with rank_0_alone(world) as is_alone:
            if is_alone:
                began, speeds = CoreTimes.read(world.cores), cpu_speeds()
                others = used_by_others(began, ended := CoreTimes.read(world.cores), ranks_s=ended.own_s - began.own_s)
                keep_speeds(speeds, were_disturbed=Surroundings.of(world, {}, others).is_disturbed)


def _make_plan(
    config: RunConfig, world: World, terminal: Terminal, requests: list[PromptRequest] | None
) -> Plan | None:
    """Plan this run; None for an unknown machine. Raises CapacityError if it cannot fit."""
    if world.device.type == "cpu" and not config.hardware:
        _measure_once(world)
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
        lengths = [len(request.prompt_ids) for request in requests] if requests else [dry_run.TYPED_TOKENS]
        plan = dry_run.plan_of_run(config, world_size=world.comm.size, machine=machine, lengths=lengths)
        if world.comm.rank == 0:
            link = machine.link
            source = next(filter(None, map(machine.sources.get, ("link", "link.bandwidth_bytes_per_s"))), "no source")
            _log.info(
                "forecast for hardware %s: links of %.4g GB/s and %.3g us (%s)",
                machine.name,
                link.bandwidth_bytes_per_s / 1e9,
                1e6 * link.latency_s,
                source,
            )
        require_room(plan, words=dry_run.settings_of_run(config))
        for warning in slower_overlapped(plan.spec, plan.hardware, plan.timing):
            terminal.say(f"warning: {warning}")
        if machine.device == "cuda" and world.comm.rank == 0:
            sizes = {len(plan.spec.target_ranks), len(plan.spec.draft_ranks)}
            if note := note_on_links(sizes, world.ranks.local_size, os.environ.get("CUDA_VISIBLE_DEVICES")):
                terminal.say(note)
    return plan


def _converse(session: Session, complete: Task) -> None:
    """Ask for a prompt and `complete` it until Ctrl-D or Ctrl-C; a resumed folder continues its numbering."""
    comm, config, maker = session.world.comm, session.config, session.models.request_maker
    index = 1 + max((index for index, _, _ in session.finished), default=-1)
    by_index = {line.index: line.prompt for line in session.folder.lines} if session.folder else {}
    # All ranks know the prompts of the folder, since equal ones are counted.
    asked = [Prompt(text=text) for _, text in from_rank_0(comm, lambda: sorted(by_index.items()))]
    typed = session.terminal.ask() if comm.rank == 0 else iter(())

    def ask() -> str | None:
        with interruptible(), suppress(KeyboardInterrupt):
            return next(typed, None)
        return None

    while True:
        comm.set_timeout(_TYPING_PATIENCE_S)
        text = from_rank_0(comm, ask)
        comm.set_timeout(config.timeouts.decode_s)
        if text is None:
            return
        whole = [*asked, Prompt(text=text)]
        try:
            requests = maker.requests(whole, config, first_index=index - len(asked))
        except ConfigError as error:
            session.terminal.say(str(error))
            continue
        asked = whole
        complete(session, [request for request in requests if request.index == index])
        index += 1

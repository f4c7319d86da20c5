"""Compares machines for one job: what fits, how fast it decodes, on how many GPUs, and at what price.

One copy of the models has 1, 2, 4, ... GPUs of a machine. Copies fill the GPUs that are rented anyway: all of a node
that is rented as a whole or has no price, none where each GPU has its own price. A job that fits no node is tried on
several. The planner chooses where the draft is; a search also chooses the draft, K and the storage of the weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from llama_ssp.config import catalogue
from llama_ssp.config.formats.format import NO_QUANTIZATION, formats
from llama_ssp.config.hardware import PER_GPU, HardwareConfig
from llama_ssp.config.plan import Objective, PlanConfig
from llama_ssp.config.schema import ADAPTIVE, DraftLayout, ModelConfig, PlacementConfig
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices.machine_choice import MachineChoice, rank, with_prices, with_speed, within
from llama_ssp.planning.memory import RankMemoryPlan, memory
from llama_ssp.planning.spec import PlannedModel, PlanSpec, make_job, planned_model
from llama_ssp.planning.timing import timing

GIB = 2**30
MOST_NODES = 4
"""Nodes that are tried if one has too little room."""
MOST_DRAFTS = 3
"""Drafts that a search tries: the one asked for, and the smallest of the catalogue with this vocabulary."""


def compare(config: PlanConfig, machines: Sequence[HardwareConfig]) -> list[MachineChoice]:
    """Price all choices on all machines for a checked config; the best by the objective first, those ruled out last."""
    ways = {machine.device: _ways(config, machine) for machine in machines}
    found = [
        choice
        for machine in machines
        for choice in _of_machine(ways[machine.device], with_prices(machine, config.prices), config)
    ]
    limited = [within(choice, config) for choice in found]
    return sorted(limited, key=lambda choice: rank(choice, config.objective or Objective.latency))


def _ways(config: PlanConfig, machine: HardwareConfig) -> list[PlanSpec]:
    """The jobs to try on machines of one device, before they have ranks: that of the config, with draft and without.

    With search=true, for every storage format of the target, and with further drafts.
    """
    alone = replace(machine, num_gpus=1, num_nodes=1)
    asked = make_job(replace(config, placement=PlacementConfig()), alone)
    plain = replace(asked, draft=None, free_draft=None, matching=None, draft_ranks=())
    if not config.search:
        return [asked, plain] if asked.drafts else [plain]
    drafting = [asked] if asked.free_draft else []
    if asked.matching is None:
        drafting += [replace(plain, draft=draft, draft_ranks=(0,)) for draft in _drafts(config, asked)]
    elif asked.draft:
        drafting.append(asked)
    targets = [_stored(config, asked, name) for name in formats()]
    return [replace(job, target=target) for target in targets for job in (plain, *drafting)]


def _stored(config: PlanConfig, asked: PlanSpec, quantization: str) -> PlannedModel:
    return planned_model(replace(config.model, quantization=quantization), device=asked.device)


def _drafts(config: PlanConfig, asked: PlanSpec) -> list[PlannedModel]:
    """The draft that was asked for, and the smallest entries of the catalogue that may share the vocabulary."""
    smaller = [catalogue.load(name) for name in catalogue.smaller_relatives(config.model)]
    found = {model.name: model for model in (planned_model(entry, device=asked.device) for entry in smaller)}
    chosen = {asked.draft.name: asked.draft} | found if asked.draft else found
    return list(chosen.values())[:MOST_DRAFTS]


def _of_machine(ways: Sequence[PlanSpec], machine: HardwareConfig, config: PlanConfig) -> list[MachineChoice]:
    """The choices on one node, and on several if the job fits no node or the machine has several."""
    node = replace(machine, num_nodes=1)
    on = partial(_on, ways, config=config)
    found = [choice for number in _counts(machine.num_gpus) for choice in on(node, num_gpus=number)]
    for num_nodes in sorted({2, MOST_NODES, machine.num_nodes} - {1}):
        fits = any(choice.reason is None for choice in found)
        if num_nodes <= machine.num_nodes or (machine.network and not fits):
            nodes = replace(machine, num_nodes=num_nodes)
            found += on(nodes, num_gpus=nodes.num_ranks)
    return found


def _counts(num_gpus: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({2**power for power in range(num_gpus.bit_length())} | {num_gpus})


def _on(
    ways: Sequence[PlanSpec], machine: HardwareConfig, *, num_gpus: int, config: PlanConfig
) -> Iterator[MachineChoice]:
    """The fastest choice for each storage format with `num_gpus` GPUs per copy; if none fits, the nearest."""
    is_shared = machine.num_nodes > 1 or machine.device == "cpu" or (machine.price and machine.price.per == PER_GPU)
    num_copies = 1 if is_shared else machine.num_gpus // num_gpus
    if machine.num_nodes == 1:
        machine = replace(machine, num_gpus=num_gpus * num_copies)
    best: dict[str, MachineChoice] = {}
    for way in ways:
        for job in _placed(way, num_gpus=num_gpus, num_copies=num_copies):
            choice = _priced(job, machine, config)
            known = best.setdefault(choice.quantization, choice)
            if _order(choice) < _order(known):
                best[choice.quantization] = choice
    yield from best.values()


def _order(choice: MachineChoice) -> tuple[float, float]:
    """Sort key for choices on the same GPUs."""
    return choice.ms_per_token or math.inf, choice.needed_bytes or math.inf


def _placed(job: PlanSpec, *, num_gpus: int, num_copies: int) -> Iterator[PlanSpec]:
    """The job on all ranks of each copy, with the draft in each sensible place."""
    ranks = tuple(range(num_gpus))
    whole = replace(job, num_replicas=num_copies, target_ranks=ranks)
    if job.draft is None:
        yield whole
        return
    yield replace(whole, draft_kind=DraftLayout.one_rank, draft_ranks=ranks[:1])
    if num_gpus > 1:
        yield replace(whole, draft_kind=DraftLayout.sharded, draft_ranks=ranks)
        yield replace(whole, draft_kind=DraftLayout.own_gpu, target_ranks=ranks[:-1], draft_ranks=ranks[-1:])
        if job.batch_size > 1:
            yield replace(whole, draft_kind=DraftLayout.replicated, draft_ranks=ranks)


def _priced(job: PlanSpec, machine: HardwareConfig, config: PlanConfig) -> MachineChoice:
    """The choice with its time, in a search for the best K that fits, or with the reason why it is ruled out."""
    describe = partial(_choice, machine=machine, entry=config.model)
    try:
        full = _fullest(job, machine)
    except PlacementError as error:
        return replace(describe(job), reason=str(error))
    if not full.fits:
        reason = f"rank {full.rank} needs {full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB"
        return replace(describe(job), reason=reason, needed_bytes=full.needed_bytes)
    timed = timing(job, machine)
    token_s = timed.plain_s if timed.speculative_s is None else timed.speculative_s
    by_number = enumerate(timed.by_num_draft_tokens if config.search else (), start=1)
    for best_s, number in sorted((seconds, number) for number, seconds in by_number):
        drafting = replace(job, num_draft_tokens=number, adapts=False)
        if (fullest := _fullest(drafting, machine)).fits:
            job, full, token_s = drafting, fullest, best_s
            break
    choice = replace(describe(job), needed_bytes=full.needed_bytes)
    return with_speed(choice, token_s, batch_size=job.batch_size, machine=machine)


def _fullest(job: PlanSpec, machine: HardwareConfig) -> RankMemoryPlan:
    return min(memory(job, machine), key=lambda rank: rank.free_bytes)


def _choice(job: PlanSpec, *, machine: HardwareConfig, entry: ModelConfig) -> MachineChoice:
    draft, has_place = job.draft.name if job.draft else job.free_draft, job.draft is not None
    return MachineChoice(
        machine=machine.name,
        gpu=machine.gpu,
        num_gpus=len(job.layout.ranks),
        num_nodes=machine.num_nodes,
        num_copies=job.num_replicas,
        quantization=job.target.quantization if job.target.quantization != NO_QUANTIZATION else job.target.dtype.name,
        draft=draft,
        draft_kind=job.draft_kind.name if has_place else None,
        num_draft_tokens=job.num_draft_tokens if job.drafts else 0,
        capacity_bytes=machine.memory_bytes // (machine.num_gpus if machine.device == "cpu" else 1),
        settings=tuple(_settings(job, machine, entry)),
    )


def _settings(job: PlanSpec, machine: HardwareConfig, entry: ModelConfig) -> Iterator[str]:
    """The settings of this choice, next to those that chose the models and the prices."""
    yield f"hardware={machine.name}"
    yield f"hardware.num_gpus={machine.num_gpus}"
    if machine.num_nodes > 1:
        yield f"hardware.num_nodes={machine.num_nodes}"
    if job.num_replicas > 1:
        yield f"placement.num_replicas={job.num_replicas}"
    if job.target.quantization != entry.quantization:
        yield f"model.quantization={job.target.quantization}"
    yield f"draft={(job.draft.name if job.draft else job.free_draft) or 'none'}"
    if job.draft:
        yield f"placement.draft.kind={job.draft_kind.name}"
    if job.drafts:
        yield f"speculation.num_draft_tokens={ADAPTIVE if job.adapts else job.num_draft_tokens}"

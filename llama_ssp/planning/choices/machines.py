"""Compares machines for one job: what fits, how fast it decodes, on how many GPUs, and at what price.

A replica of the models has 1, 2, 4, ... GPUs of a machine. Replicas fill the GPUs that are rented anyway: all of a node
that is rented as a whole or has no price, none where each GPU has its own price. A job that fits no node is tried on
several. The planner chooses where the draft is; a search also chooses the draft, K and the storage of the weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from llama_ssp.config import catalogue
from llama_ssp.config.formats import NO_QUANTIZATION, formats
from llama_ssp.config.machines.hardware import PER_GPU, HardwareConfig
from llama_ssp.config.plan import Objective, PlanConfig
from llama_ssp.config.schema import ModelConfig, PlacementConfig
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices.elsewhere import has_its_own_number
from llama_ssp.planning.choices.layouts import on_block, placement_settings
from llama_ssp.planning.choices.lengths import by_length, length_setting
from llama_ssp.planning.choices.machine_choice import MachineChoice, rank, with_prices, with_speed, within
from llama_ssp.planning.memory import RankMemoryPlan, fullest_rank
from llama_ssp.planning.spec import PlannedModel, PlanSpec, make_job, planned_model
from llama_ssp.planning.timing import Timing, timing

GIB = 2**30
MOST_NODES = 4
"""Nodes that are tried if one has too little room."""
MOST_DRAFTS = 3
"""Drafts that a search tries: the one asked for, and the smallest of the catalogue with this vocabulary."""
_OF_MEMORY = ("device", "rank_bytes", "context_bytes", "collective_bytes")
_OF_SPEED = (
    "device", "bandwidth_bytes_per_s", "copy_bytes_per_s", "flops_per_s", "slowdown", "kernel_s", "launch_s", "link",
)  # fmt: skip
"""Figures that decide the bytes of a job, and its times on one node."""


class Times:
    """Bytes and times of the jobs of one comparison: machines with the same GPUs share them, whatever they are called.

    Jobs differ in models, ranks, replicas, where the draft is, and K.
    """

    def __init__(self) -> None:
        self._fullest: dict[tuple[object, ...], RankMemoryPlan] = {}
        self._timings: dict[tuple[object, ...], Timing] = {}

    def fullest(self, job: PlanSpec, machine: HardwareConfig) -> RankMemoryPlan:
        """Return the bytes of the rank with the least room; raises as `memory`."""
        has_others = job.num_replicas * len(job.layout.ranks) > 1
        key = (*_figures(machine, _OF_MEMORY), has_others, *_key(job))
        if key not in self._fullest:
            self._fullest[key] = fullest_rank(job, machine)
        return self._fullest[key]

    def timing(self, job: PlanSpec, machine: HardwareConfig) -> Timing:
        """Return the times; raises as `memory`."""
        gpu = _figures(machine, _OF_SPEED)
        if machine.profiles or machine.num_nodes > 1:
            gpu += (machine.name, machine.num_gpus, machine.network, job.num_replicas)
        key = (gpu, *_key(job))
        if key not in self._timings:
            self._timings[key] = timing(job, machine)
        return self._timings[key]


def _figures(machine: HardwareConfig, names: Sequence[str]) -> tuple[object, ...]:
    values = (getattr(machine, name) for name in names)
    return tuple(tuple(value.items()) if isinstance(value, dict) else value for value in values)


def _key(job: PlanSpec) -> tuple[object, ...]:
    """All in which the jobs of one comparison differ, besides replicas."""
    models = id(job.target), id(job.draft), job.free_draft
    return *models, job.draft_kind.name, job.target_ranks, job.draft_ranks, job.num_draft_tokens, job.adapts


def compare(config: PlanConfig, machines: Sequence[HardwareConfig]) -> list[MachineChoice]:
    """Price all choices on all machines for a checked config; the best by the objective first, those ruled out last."""
    ways = {device: _ways(config, machine) for device, machine in {one.device: one for one in machines}.items()}
    times = Times()
    found = [
        choice
        for machine in machines
        for choice in _of_machine(ways[machine.device], with_prices(machine, config.prices), config, times)
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


def _of_machine(
    ways: Sequence[PlanSpec], machine: HardwareConfig, config: PlanConfig, times: Times
) -> list[MachineChoice]:
    """The choices on one node, and on several if the job fits no node or the machine has several."""
    node = replace(machine, num_nodes=1)
    num_own = machine.num_gpus if has_its_own_number(machine) else None
    on = partial(_on, ways, config=config, times=times, num_own=num_own)
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
    ways: Sequence[PlanSpec], machine: HardwareConfig,
    *,
    num_gpus: int, config: PlanConfig, times: Times, num_own: int | None,
) -> Iterator[MachineChoice]:  # fmt: skip
    """The fastest choice for each storage format with `num_gpus` GPUs per replica; if none fits, the nearest.

    `num_own` GPUs need no setting.
    """
    is_shared = machine.num_nodes > 1 or machine.device == "cpu" or (machine.price and machine.price.per == PER_GPU)
    num_replicas = 1 if is_shared else machine.num_gpus // num_gpus
    if machine.num_nodes == 1:
        machine = replace(machine, num_gpus=num_gpus * num_replicas)
    best: dict[str, _Priced] = {}
    for way in ways:
        for job in on_block(replace(way, num_replicas=num_replicas), num_gpus):
            name = job.target.quantization
            priced = _price(job, machine, times, chooses_k=config.search, below=best.get(name))
            if priced and (name not in best or priced.order < best[name].order):
                best[name] = priced
    yield from (_choice(priced, machine, config.model, num_own=num_own) for priced in best.values())


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """A job with its seconds per token, or with the reason why it is ruled out."""

    job: PlanSpec
    token_s: float | None = None
    needed_bytes: int | None = None
    is_tight: bool = False
    reason: str | None = None

    @property
    def order(self) -> tuple[float, float]:
        """Sort key for jobs on the same GPUs."""
        return self.token_s or math.inf, self.needed_bytes or math.inf


def _price(
    job: PlanSpec, machine: HardwareConfig, times: Times, *, chooses_k: bool, below: _Priced | None
) -> _Priced | None:
    """Price a job, for the best K that fits if it is to be chosen; None if it is slower than `below`."""
    try:
        full = times.fullest(job, machine)
    except PlacementError as error:
        return _Priced(job=job, reason=str(error))
    if not full.fits:
        reason = f"rank {full.rank} needs {full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB"
        return _Priced(job=job, reason=reason, needed_bytes=full.needed_bytes)
    timed = times.timing(job, machine)
    if not (chooses_k and timed.by_num_draft_tokens):
        token_s = timed.plain_s if timed.speculative_s is None else timed.speculative_s
        return _Priced(job=job, token_s=token_s, needed_bytes=full.needed_bytes, is_tight=full.is_tight)
    most_s = below.token_s or math.inf if below else math.inf
    for token_s, drafting in by_length(job, timed):
        if token_s >= most_s:
            return None
        if (full := times.fullest(drafting, machine)).fits:
            return _Priced(job=drafting, token_s=token_s, needed_bytes=full.needed_bytes, is_tight=full.is_tight)
    return None


def _choice(priced: _Priced, machine: HardwareConfig, entry: ModelConfig, *, num_own: int | None) -> MachineChoice:
    job = priced.job
    storage = job.target.quantization
    choice = MachineChoice(
        machine=machine.name,
        gpu=machine.gpu,
        num_gpus=len(job.layout.ranks),
        num_nodes=machine.num_nodes,
        num_replicas=job.num_replicas,
        quantization=job.target.dtype.name if storage == NO_QUANTIZATION else storage,
        draft=job.draft.name if job.draft else job.free_draft,
        draft_kind=job.draft_kind.name if job.draft else None,
        num_draft_tokens=job.num_draft_tokens if job.drafts else 0,
        adapts=job.drafts and job.adapts,
        capacity_bytes=machine.rank_bytes,
        needed_bytes=priced.needed_bytes,
        is_tight=priced.is_tight,
        reason=priced.reason,
        settings=tuple(_settings(job, machine, entry, num_own=num_own)),
    )
    if priced.token_s is None:
        return choice
    return with_speed(choice, priced.token_s, batch_size=job.batch_size, machine=machine)


def _settings(job: PlanSpec, machine: HardwareConfig, entry: ModelConfig, *, num_own: int | None) -> Iterator[str]:
    """The settings of this choice, next to those that chose the models and the prices."""
    yield f"hardware={machine.name}"
    if machine.num_gpus != num_own:
        yield f"hardware.num_gpus={machine.num_gpus}"
    if machine.num_nodes > 1:
        yield f"hardware.num_nodes={machine.num_nodes}"
    if job.target.quantization != entry.quantization:
        yield f"model.quantization={job.target.quantization}"
    yield f"draft={(job.draft.name if job.draft else job.free_draft) or 'none'}"
    yield from placement_settings(job)
    if job.drafts:
        yield length_setting(job)

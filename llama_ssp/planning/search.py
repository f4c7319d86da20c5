"""Ranks all sensible ways to use a machine for a model by speed, including those that do not fit.

The asked model comes first, then the smaller ones of its series, the fastest first. Each is tried in every precision,
with every draft of its vocabulary, in the `layouts` of the machine's ranks, with the best K.

Compares machines for one job: what fits, how fast it decodes, on how many GPUs, and at what price.

A replica of the models has 1, 2, 4, ... GPUs of a machine. Replicas fill the GPUs that are rented anyway: all of a node
that is rented as a whole or has no price, none where each GPU has its own price. A job that fits no node is tried on
several. The planner chooses where the draft is; a search also chooses the draft, K and the storage of the weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from llama_ssp.errors import PlacementError
from llama_ssp.machines.hardware import PER_GPU, PER_NODE, HardwareConfig, Price
from llama_ssp.planning.advice import has_its_own_number
from llama_ssp.planning.layouts import (
    by_length,
    layouts,
    length_setting,
    notes_on_guesses,
    on_block,
    placement_settings,
)
from llama_ssp.planning.memory import RankMemoryPlan, fits, fullest_rank
from llama_ssp.planning.spec import PlannedModel, PlanSpec, job_of_plan, notes_on_families, planned_model
from llama_ssp.planning.timing import Timing, timing
from llama_ssp.settings import catalogue
from llama_ssp.settings.formats import NO_QUANTIZATION, format_of, formats
from llama_ssp.settings.schema import DraftLayout, ModelConfig, Objective, PlacementConfig, PlanConfig

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to use the machine.

    Attributes:
        num_ranks, num_replicas: ranks of a replica, and the replicas that fill the machine.
        adapts: K is chosen for each round, because nobody knows which one is best.
        overlaps: drafting overlaps verification.
        ms_per_token: of a completion, for the best K, or plain without a draft.
        tokens_per_s: of all rows and replicas.
        first_token_ms: the prompt.
        is_tight: it fits with less than 3 % of a rank's memory left.
        reason: why the choice does not fit.
        settings: what to add to the command line to plan or run it.
    """

    target: str
    quantization: str
    draft: str | None
    draft_kind: str | None
    num_draft_tokens: int
    num_ranks: int
    num_replicas: int
    adapts: bool = False
    overlaps: bool = False
    ms_per_token: float | None = None
    tokens_per_s: float | None = None
    first_token_ms: float | None = None
    speedup: float | None = None
    needed_bytes: int | None = None
    capacity_bytes: int
    is_tight: bool = False
    reason: str | None = None
    settings: tuple[str, ...]


def search(job: PlanSpec, hardware: HardwareConfig) -> list[Choice]:
    """Price all candidates for a job like this one: the asked model first, the fastest first, misfits of each last."""
    choices = [_price_use(candidate, hardware) for candidate in _candidates(job, hardware)]
    asked = _unquantized(job.target.name)
    fastest: dict[str, float] = {}
    for one in choices:
        fastest[one.target] = min(one.ms_per_token or math.inf, fastest.get(one.target, math.inf))
    return sorted(
        choices,
        key=lambda choice: (
            choice.target != asked, fastest[choice.target], choice.target,
            choice.ms_per_token is None, choice.ms_per_token or 0.0, choice.num_ranks,
        ),
    )  # fmt: skip


def search_document(choices: list[Choice]) -> list[dict[str, Any]]:
    """The choices for JSON, numbered by rank."""
    return [{"rank": rank} | vars(choice) for rank, choice in enumerate(choices, start=1)]


def _candidates(job: PlanSpec, hardware: HardwareConfig) -> Iterator[PlanSpec]:
    """Every model, precision, draft and layout; a layout that lacks room for the target alone is tried without drafts.

    Entries that are quantized by name are left out: they are the same models with a quantization.
    """
    known = catalogue.entries()
    for model in _series(job.target, known):
        drafts = [planned_model(draft, device=hardware.device) for draft in _drafts_of(model, known)]
        if job.draft and job.matching is None and _is_beyond_catalogue(job) and _is_asked(model, job):
            drafts += [job.draft] if job.draft.name not in {draft.name for draft in drafts} else []
        for quantization in formats():
            target = planned_model(replace(model, quantization=quantization), device=hardware.device)
            plain = replace(job, target=target, draft=None, matching=None, draft_ranks=(), overlap=False)
            for base in layouts(plain, num_ranks=hardware.num_ranks, divides=True, thorough=False):
                yield base
                if _has_room(base, hardware):
                    yield from _drafted(base, drafts)


def _is_beyond_catalogue(job: PlanSpec) -> bool:
    return not {model.name for model in (job.target, job.draft) if model} <= set(catalogue.names())


def _is_asked(model: ModelConfig, job: PlanSpec) -> bool:
    return model.name == _unquantized(job.target.name)


def _drafted(base: PlanSpec, drafts: list[PlannedModel]) -> Iterator[PlanSpec]:
    num_ranks = len(base.target_ranks) * base.num_replicas
    for draft in drafts:
        for job in layouts(replace(base, draft=draft), num_ranks=num_ranks, divides=False, thorough=False):
            yield job
            if job.draft_kind is DraftLayout.own_gpu:
                yield replace(job, overlap=True)


def _has_room(job: PlanSpec, hardware: HardwareConfig) -> bool:
    try:
        return fits(job, hardware)
    except PlacementError:
        return False


def _series(target: PlannedModel, known: list[ModelConfig]) -> list[ModelConfig]:
    """The model, and the smaller unquantized ones with the same name prefix (`llama2_`), family and vocabulary.

    A model that the catalogue lacks, of the hub or from a folder, is alone.
    """
    entry = next((each for each in known if each.name == target.name), None)
    if entry is None or entry.shape is None:
        return [ModelConfig(name=target.name, shape=target.shape, stored_dtype=target.stored)]
    series = {_unquantized(target.name), *catalogue.smaller_relatives(entry, known=known)}
    return [
        other for other in catalogue.relatives(entry, known=known)
        if other.name in series and _prefix(other.name) == _prefix(target.name)
    ]  # fmt: skip


def _unquantized(name: str) -> str:
    return name.removesuffix("_8bit")


def _prefix(name: str) -> str:
    return _unquantized(name).rpartition("_")[0]


def _drafts_of(model: ModelConfig, known: list[ModelConfig]) -> list[ModelConfig]:
    """Smaller models of the same vocabulary, and the entry's default draft; of equal sizes one, of the series first.

    A default draft of the hub has no sizes before somebody asks for it, and is left out.
    """
    names = {*catalogue.smaller_relatives(model, known=known), model.default_draft}
    found: dict[tuple[int, ...], ModelConfig] = {}
    for draft in sorted(known, key=lambda other: _prefix(other.name) != _prefix(model.name)):
        if draft.name in names and draft.shape:
            sizes = (draft.shape.num_hidden_layers, draft.shape.hidden_size, draft.shape.intermediate_size)
            found.setdefault(sizes, draft)
    return list(found.values())


def _price_use(job: PlanSpec, hardware: HardwareConfig) -> Choice:
    try:
        timed = timing(job, hardware)
        for token_s, way in [*by_length(job, timed)] or [(timed.plain_s, job)]:
            full = fullest_rank(way, hardware)
            if full.fits:
                return _timed(way, hardware, full, timed, token_s=token_s)
            if not (asked := fullest_rank(job, hardware)).fits:
                full = asked
                break
    except PlacementError as error:
        return _use(job, hardware, reason=str(error))
    reason = f"rank {full.rank} needs {full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB"
    return _use(job, hardware, needed_bytes=full.needed_bytes, reason=reason)


def _timed(job: PlanSpec, hardware: HardwareConfig, full: RankMemoryPlan, timed: Timing, *, token_s: float) -> Choice:
    return _use(
        job, hardware,
        ms_per_token=1e3 * token_s,
        tokens_per_s=job.batch_size * job.num_replicas / token_s,
        first_token_ms=1e3 * timed.prefill_s,
        speedup=timed.plain_s / token_s,
        needed_bytes=full.needed_bytes,
        is_tight=full.is_tight,
    )  # fmt: skip


def _use(job: PlanSpec, hardware: HardwareConfig, **figures: Any) -> Choice:  # noqa: ANN401 - fields of a choice
    storage, draft = format_of(job.target.quantization), job.draft
    settings = [f"model={job.target.name}", f"draft={draft.name if draft else 'none'}"]
    if storage.is_quantized:
        settings.append(f"model.quantization={storage.name}")
    settings += placement_settings(job)
    if draft:
        settings.append(length_setting(job))
    return Choice(
        target=job.target.name,
        quantization=storage.name if storage.is_quantized else job.target.dtype.name,
        draft=draft.name if draft else None,
        draft_kind=job.draft_kind.name if draft else None,
        num_draft_tokens=job.num_draft_tokens if draft else 0,
        adapts=bool(draft) and job.adapts,
        overlaps=job.overlaps,
        num_ranks=len(job.layout.ranks),
        num_replicas=job.num_replicas,
        capacity_bytes=hardware.rank_bytes,
        settings=tuple(settings),
        **figures,
    )


_SECONDS_PER_HOUR, _MILLION = 3600, 10**6


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """One way to use a machine.

    Attributes:
        num_gpus: GPUs of a replica, over `num_nodes` nodes.
        num_replicas: replicas on all that is rented.
        num_draft_tokens: K; 0 for plain decoding, where a draft gains nothing.
        adapts: K is chosen for each round, up to this one.
        ms_per_token: of each completion while it is decoded.
        tokens_per_s: of all rows of all replicas.
        usd_per_hour: of what is rented; None without a known price.
        is_tight: it fits with less than 3 % of a rank's memory left.
        reason: why the choice is ruled out; None if it is not.
        settings: those of the plan of this choice.
    """

    machine: str
    gpu: str
    num_gpus: int
    num_nodes: int
    num_replicas: int
    quantization: str
    draft: str | None = None
    draft_kind: str | None = None
    num_draft_tokens: int = 0
    adapts: bool = False
    ms_per_token: float | None = None
    tokens_per_s: float | None = None
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    needed_bytes: int | None = None
    capacity_bytes: int
    is_tight: bool = False
    reason: str | None = None
    settings: tuple[str, ...] = ()


def with_speed(choice: MachineChoice, token_s: float, *, batch_size: int, machine: HardwareConfig) -> MachineChoice:
    """The choice with the time of a token of each row, and what follows from it."""
    tokens_per_s = choice.num_replicas * batch_size / token_s
    hourly = usd_per_hour(machine)
    million = hourly and hourly * _MILLION / (tokens_per_s * _SECONDS_PER_HOUR)
    return replace(
        choice, ms_per_token=1e3 * token_s, tokens_per_s=tokens_per_s, usd_per_hour=hourly,
        usd_per_million_tokens=million,
    )  # fmt: skip


def usd_per_hour(machine: HardwareConfig) -> float | None:
    """What all GPUs of a machine cost per hour; None without a known price."""
    if machine.price is None:
        return None
    rented = machine.num_ranks if machine.price.per == PER_GPU else machine.num_nodes
    return rented * machine.price.usd_per_hour


def with_prices(machine: HardwareConfig, prices: Mapping[str, float]) -> HardwareConfig:
    """The machine with the price that a setting gives it, per node unless its file says otherwise."""
    if machine.name not in prices:
        return machine
    price = Price(usd_per_hour=prices[machine.name], per=machine.price.per if machine.price else PER_NODE)
    return replace(machine, price=price)


def within(choice: MachineChoice, config: PlanConfig) -> MachineChoice:
    """The choice, ruled out if it exceeds the limits."""
    ms, usd = choice.ms_per_token, choice.usd_per_hour
    reason = choice.reason
    if reason or ms is None:
        return choice
    if config.max_ms_per_token is not None and ms > config.max_ms_per_token:
        reason = f"{ms:.2f} ms/token are more than max_ms_per_token={config.max_ms_per_token:g}"
    elif config.max_price is not None and usd is None:
        reason = f"no price is known: prices={{{choice.machine}:USD_PER_HOUR}} gives one"
    elif config.max_price is not None and usd is not None and usd > config.max_price:
        reason = f"{usd:.2f} USD an hour are more than max_price={config.max_price:g}"
    return replace(choice, reason=reason)


def rank(choice: MachineChoice, objective: Objective) -> tuple[Any, ...]:
    """Sort key; the price decides between equals, then the number of GPUs."""
    ms, rate = choice.ms_per_token or math.inf, choice.tokens_per_s or 0.0
    costs = choice.usd_per_million_tokens, choice.usd_per_hour
    price, hourly = (math.inf if cost is None else cost for cost in costs)
    by = {Objective.latency: ms, Objective.throughput: -rate, Objective.price: price}[objective]
    return choice.reason is not None, by, hourly, ms, choice.num_gpus, choice.machine


def nothing_left(choices: Sequence[MachineChoice]) -> str | None:
    """An error sentence if every choice is ruled out, with the one that comes closest; else None."""
    if any(choice.reason is None for choice in choices):
        return None
    num_machines = len({choice.machine for choice in choices})
    nearest = min(choices, key=lambda choice: (choice.ms_per_token is None, _lacking(choice)))
    which = f"{num_machines} machines" if num_machines > 1 else nearest.machine
    return f"nothing is left of {which}; the closest is {nearest.num_gpus} x {nearest.gpu}: {nearest.reason}"


def _lacking(choice: MachineChoice) -> float:
    """How far a choice is from what is required."""
    return choice.ms_per_token or (choice.needed_bytes or math.inf) / choice.capacity_bytes


def comparison_document(
    choices: Sequence[MachineChoice], config: PlanConfig, machines: Sequence[HardwareConfig]
) -> dict[str, Any]:
    """The comparison for JSON: the choices numbered by rank, the prices with their dates, and notes."""
    priced = [with_prices(machine, config.prices) for machine in machines]
    models = [config.model, *([config.draft.model] if config.draft.model else [])]
    return {
        "objective": (config.objective or Objective.latency).name,
        "model": config.model.name,
        "batch_size": config.batch_size,
        "prices": {
            machine.name: asdict(machine.price) | {"source": machine.sources.get("price.usd_per_hour")}
            for machine in priced
            if machine.price
        },
        "notes": [
            *notes_on_families(*models),
            *notes_on_guesses(config.search and choice.adapts and choice.reason is None for choice in choices),
        ],
        "machines": [{"rank": rank} | asdict(choice) for rank, choice in enumerate(choices, start=1)],
    }


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
    asked = job_of_plan(replace(config, placement=PlacementConfig()), alone)
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

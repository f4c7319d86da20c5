"""All ways to use ranks for a job: `placement=auto`, `search=true`, comparisons of machines and advice choose here.

The ranks form one block per replica, and the blocks have equal sizes. Inside a block:

    target   all ranks of the block; all but the last few, if the draft has ranks of its own
    draft    whole on the first rank; sharded; whole on every rank, for its share of the rows; on the last ranks

16 ranks are 1 replica of 16, 2 of 8 (a node each), 4 of 4, 8 of 2, or 16 of 1.

A search ranks them by speed for one machine: the asked model first, then the smaller ones of its series, each in every
precision, with every draft of its vocabulary and the best K, those that do not fit last.

A comparison ranks machines: what fits, how fast it decodes, on how many GPUs, and at what price. Each number of GPUs
that is rented together is tried, with replicas of 1, 2, 4, ... of them that fill it; without a price it is the whole
node. A job that fits no node is tried on several.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

from llama_ssp.architectures.family import inventory
from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware as catalogue_of_machines
from llama_ssp.machines.hardware import HardwareConfig, Price
from llama_ssp.planning.memory import RankMemoryPlan, fits, fullest_rank
from llama_ssp.planning.spec import (
    PlannedModel,
    PlanSpec,
    block_sizes,
    job_of_plan,
    notes_on_families,
    on_block,
    planned_model,
)
from llama_ssp.planning.timing import Ends, Timing, times, timing
from llama_ssp.settings import catalogue
from llama_ssp.settings.drafters import NGRAM_DRAFT
from llama_ssp.settings.formats import NO_QUANTIZATION, format_of, formats
from llama_ssp.settings.layout import named
from llama_ssp.settings.schema import (
    ADAPTIVE,
    ADAPTIVE_LENGTHS,
    DraftLayout,
    DraftPlacement,
    ModelConfig,
    Objective,
    PlacementConfig,
    PlanConfig,
    TextKind,
    WholeParts,
)
from llama_ssp.settings.trees import tree_shape
from llama_ssp.words import rounded

GIB = 2**30
MOST_NODES = 4
"""Nodes that are tried if one has too little room."""
TREES = tuple(map(tree_shape, ("2x1x1", "2x2x1", "3x2x1x1", "4x2x2x1x1")))
Cost: TypeAlias = tuple[bool, int, float]
"""What a choice on a machine is made by, see `_cost`."""
NO_COST: Cost = (True, 0, math.inf)
FEW_ROWS = 4
"""Trees that a search tries, and the most rows that it tries them for: each row has a tree of its own."""


def layouts(job: PlanSpec, *, num_ranks: int, divides: bool, thorough: bool) -> Iterator[PlanSpec]:
    """The job in every layout of `num_ranks`; its own ranks and draft kind are ignored.

    It keeps its number of replicas, the most ranks each; `divides` also allows more replicas of fewer ranks. A draft
    has one rank or all; if `thorough` also every number between, and its ranks hold each of `WholeParts` whole.
    """
    most = num_ranks // job.num_replicas
    for size in block_sizes(most) if divides else [most]:
        yield from on_block(replace(job, num_replicas=num_ranks // size), size, thorough=thorough)


def placement_settings(job: PlanSpec) -> list[str]:
    """The settings that place a job like this one, for `llama-ssp plan` and `run` alike."""
    settings = [] if job.num_replicas == 1 else [f"placement.num_replicas={job.num_replicas}"]
    if job.draft is None:
        return settings
    settings.append(f"placement.draft.kind={job.draft_kind.name}")
    if job.overlaps:
        settings.append("speculation.overlap=true")
    num_default = {DraftLayout.one_rank: 1, DraftLayout.own_gpu: 1}.get(job.draft_kind, len(job.target_ranks))
    if len(job.draft_ranks) != num_default:
        settings.append(f"placement.draft.tp_size={len(job.draft_ranks)}")
    if whole := _unusual_whole(job):
        settings.append(f"placement.draft.whole={whole.name}")
    return settings


def _unusual_whole(job: PlanSpec) -> WholeParts | None:
    """What the ranks that share a draft hold whole; None by default, and where no ranks share it."""
    is_shared = job.draft is not None and job.draft_kind is not DraftLayout.replicated and len(job.draft_ranks) > 1
    return job.draft_whole if is_shared and job.draft_whole is not DraftPlacement().whole else None


def by_length(job: PlanSpec, timed: Timing) -> Iterator[tuple[float, PlanSpec]]:
    """Seconds per token of the job with every K, the fastest first; K = auto comes before where no K is recommended.

    Nothing without a draft.
    """
    times = timed.by_num_draft_tokens
    if times and job.overlaps and not timed.knows_best_k:  # overlap needs one K for all rounds
        yield times[job.num_draft_tokens - 1], replace(job, adapts=False)
        return
    if times and not timed.knows_best_k:
        token_s = min(timed.plain_s, *(times[number - 1] for number in ADAPTIVE_LENGTHS))
        yield token_s, replace(job, num_draft_tokens=max(ADAPTIVE_LENGTHS), adapts=True)
    by_time = sorted((token_s, number) for number, token_s in enumerate(times, start=1))
    yield from ((token_s, replace(job, num_draft_tokens=number, adapts=False)) for token_s, number in by_time)


def length_setting(job: PlanSpec) -> str:
    """The setting of a job's K, or of its trees."""
    if job.tree:
        return f"speculation.tree={job.tree.text}"
    return f"speculation.num_draft_tokens={ADAPTIVE if job.adapts else job.num_draft_tokens}"


def _of_choice(job: PlanSpec) -> Iterator[str]:
    """The settings of a job of a search besides the names of its models."""
    if job.draft and job.draft.setting != NO_QUANTIZATION:
        yield f"draft.model.quantization={job.draft.setting}"
    yield from placement_settings(job)
    if job.drafts:
        yield length_setting(job)
    if job.device == "cuda" and not job.cuda_graphs:
        yield "cuda_graphs=false"


def notes_on_guesses(adapts: Iterable[bool]) -> list[str]:
    """The note of a search if K adapts in one of its choices."""
    said = (
        "K auto: nobody has measured this pair, and its times rest on a forecast of its acceptance; the plan of a row "
        "has their range, and says how to narrow it"
    )
    return [said] if any(adapts) else []


def has_its_own_number(hardware: HardwareConfig) -> bool:
    """Whether a machine has as many GPUs as its entry of the catalogue says, which no setting needs to repeat."""
    known = catalogue_of_machines
    return hardware.name in known.names() and known.load(hardware.name).num_gpus == hardware.num_gpus


def choose_placement(
    job: PlanSpec, hardware: HardwareConfig, *, num_ranks: int, divides: bool = False
) -> tuple[PlanSpec, str]:
    """Choose by the forecast time of a completion, prompt included, among the placements that fit.

    The ranks and draft kind of `job` are ignored. Each replica uses an equal block of `num_ranks`, of which `hardware`
    may have more; `divides` allows more replicas on smaller blocks.

    Returns:
        The job with the chosen ranks, and a sentence that gives the reason. If nothing fits, it is the first placement
        that can be laid out; its plan says what is missing.

    Raises:
        PlacementError: none can be laid out.
    """
    possible: list[PlanSpec] = []
    timed: list[tuple[float, PlanSpec]] = []
    error = None
    for candidate in layouts(job, num_ranks=num_ranks, divides=divides, thorough=True):
        try:
            if fullest_rank(candidate, hardware).fits:
                forecast = timing(candidate, hardware)
                timed.append((forecast.speculative_run_s or forecast.plain_run_s, candidate))
            possible.append(candidate)
        except PlacementError as found:
            error = error or found
    if error and not possible:
        raise error
    if not timed:
        return possible[0], f"placement=auto: none fits, this plan has {_described(possible[0])}"
    (run_s, chosen), *others = sorted(timed, key=lambda pair: pair[0])
    compared = ", the only one that fits"
    if others:
        second_s, second = others[0]
        compared = f"; the second of {len(timed)} that fit is {_described(second)} at {rounded(1e3 * second_s)}"
    return chosen, f"placement=auto: {_described(chosen)}, forecast at {rounded(1e3 * run_s)} ms per token{compared}"


def _described(job: PlanSpec) -> str:
    copies = f"{job.num_replicas} replicas, each with " if job.num_replicas > 1 else ""
    target = f"{copies}the target on {named(job.target_ranks)}"
    if not job.draft:
        return target
    whole = f", {each.name} whole" if (each := _unusual_whole(job)) else ""
    kind = "" if job.draft_kind is DraftLayout.one_rank else f" ({job.draft_kind.name}{whole})"
    return f"{target} and the draft on {named(job.draft_ranks)}{kind}"


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """A job with its seconds per token and what it is chosen by (`_cost`), or with why it is ruled out."""

    job: PlanSpec
    fullest: RankMemoryPlan | None = None
    timed: Timing | None = None
    token_s: float = math.inf
    cost: Cost = NO_COST
    reason: str | None = None

    @property
    def order(self) -> tuple[Cost, float]:
        """Sort key for jobs on the same GPUs."""
        return self.cost, self.fullest.needed_bytes if self.fullest else math.inf

    def figures(self) -> dict[str, Any]:
        """What rows of a search and of a comparison have in common."""
        job, full, fits = self.job, self.fullest, self.reason is None
        return {
            "num_replicas": job.num_replicas,
            "batch_size": job.batch_size,
            "quantization": job.target.weights_name,
            "draft": job.draft.name if job.draft else job.free_draft,
            "draft_quantization": job.draft.weights_name if job.draft else None,
            "draft_kind": job.draft_kind.name if job.draft else None,
            "num_draft_tokens": job.num_draft_tokens if job.drafts else 0,
            "adapts": job.drafts and job.adapts,
            "tree": job.tree and job.tree.text,
            "ms_per_token": 1e3 * self.token_s if fits else None,
            "tokens_per_s": job.batch_size * job.num_replicas / self.token_s if fits else None,
            "needed_bytes": full.needed_bytes if full else None,
            "is_tight": full is not None and full.is_tight,
            "reason": self.reason,
        }


def _cost(job: PlanSpec, timed: Timing, token_s: float, config: PlanConfig | None, num_rows: int = 1) -> Cost:
    """Whether it exceeds a limit of time, the batches that rows wait for, and seconds of a token while it is decoded.

    If the objective counts prompts, no batches, and seconds with the prompts over all rows.
    """
    if config is None:
        return False, 0, token_s
    completion_s = timed.prefill_s + (job.max_new_tokens - 1) * token_s
    num_earlier = _num_earlier(job, num_rows)
    first_s = timed.prefill_s + num_earlier * completion_s
    limits = (config.max_ms_per_token, token_s), (config.max_first_token_ms, first_s)
    is_beyond = any(most_ms is not None and 1e3 * seconds > most_ms for most_ms, seconds in limits)
    if config.objective not in {Objective.throughput, Objective.price}:
        return is_beyond, num_earlier, token_s
    return is_beyond, 0, completion_s / job.max_new_tokens / job.batch_size


def _num_earlier(job: PlanSpec, num_rows: int) -> int:
    """The batches that the last of `num_rows` rows of a replica wait for."""
    return max(-(-num_rows // job.batch_size) - 1, 0)


def _price(
    job: PlanSpec, machine: HardwareConfig,
    *,
    chooses_k: bool = True, config: PlanConfig | None = None, below: Cost = NO_COST,
) -> _Priced | None:  # fmt: skip
    """Price a job, with the best K that fits if it is to be chosen; None if its cost is `below` or more.

    Where no K fits for want of room for CUDA graphs, it is priced without them.
    """
    try:
        full = asked = fullest_rank(job, machine)
    except PlacementError as error:
        return _Priced(job=job, reason=str(error))
    if full.fits or (chooses_k and job.drafts and fits(replace(job, num_draft_tokens=1, adapts=False), machine)):
        timed = timing(job, machine)
        asked_s = timed.plain_s if timed.speculative_s is None else timed.speculative_s
        ways = by_length(job, timed) if chooses_k else iter(())
        for token_s, way in chain([next(ways, (asked_s, job))], ways):
            if (cost := _cost(job, timed, token_s, config)) >= below:
                return None
            if (full := fullest_rank(way, machine)).fits:
                return _Priced(job=way, fullest=full, timed=timed, token_s=token_s, cost=cost)
    if chooses_k and job.cuda_graphs and asked.free_bytes + asked.graphs_bytes >= 0:
        return _price(replace(job, cuda_graphs=False), machine, config=config, below=below)
    full = full if asked.fits else asked
    reason = f"rank {full.rank} needs {full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB"
    return _Priced(job=job, fullest=full, reason=reason)


def search(job: PlanSpec, hardware: HardwareConfig) -> list[dict[str, Any]]:
    """Price all candidates for a job like this one: the asked model first, the fastest first, misfits of each last.

    docs/reference/plan-document.md describes the fields.
    """
    priced = [found for candidate in _candidates(job, hardware) if (found := _price(candidate, hardware))]
    asked = _unquantized(job.target.name)
    fastest: dict[str, float] = {}
    for one in priced:
        name = one.job.target.name
        fastest[name] = min(one.token_s, fastest.get(name, math.inf))

    def order(one: _Priced) -> tuple[Any, ...]:
        name = one.job.target.name
        return name != asked, fastest[name], name, one.token_s, len(one.job.layout.ranks)

    return [{"rank": rank} | _row(one, hardware) for rank, one in enumerate(sorted(priced, key=order), start=1)]


_COLUMNS = (
    "target", "quantization", "draft", "draft_quantization", "draft_kind", "num_draft_tokens", "num_ranks",
    "num_replicas", "adapts", "tree", "overlaps", "ms_per_token", "tokens_per_s", "first_token_ms", "speedup",
    "needed_bytes", "capacity_bytes", "is_tight", "reason", "settings",
)  # fmt: skip


def _row(one: _Priced, hardware: HardwareConfig) -> dict[str, Any]:
    job, quantization, found = one.job, one.job.target.setting, one.figures()
    settings = [f"model={job.target.name}", f"draft={found['draft'] or 'none'}"]
    settings += [f"model.quantization={quantization}"] if quantization != NO_QUANTIZATION else []
    found |= {
        "target": job.target.name,
        "num_ranks": len(job.layout.ranks),
        "overlaps": job.overlaps,
        "first_token_ms": 1e3 * one.timed.prefill_s if one.timed else None,
        "speedup": one.timed.plain_s / one.token_s if one.timed else None,
        "capacity_bytes": hardware.rank_bytes,
        "settings": (*settings, *_of_choice(job)),
    }
    return {name: found[name] for name in _COLUMNS}


def _candidates(job: PlanSpec, hardware: HardwareConfig) -> Iterator[PlanSpec]:
    """Every model, precision, draft and layout; a layout that lacks room for the target alone is tried without drafts.

    Entries that are quantized by name are left out: they are the same models with a quantization.
    """
    known = catalogue.entries()
    is_beyond = not {model.name for model in (job.target, job.draft) if model} <= set(catalogue.names("model"))
    for model in _series(job.target, known):
        drafts = [draft for entry in _drafts_of(model, known) for draft in _in_formats(entry, device=hardware.device)]
        is_asked = model.name == _unquantized(job.target.name)
        if job.draft and not job.own_tokenizer and is_beyond and is_asked:
            drafts += [job.draft] if job.draft.name not in {draft.name for draft in drafts} else []
        for quantization in formats():
            target = planned_model(replace(model, quantization=quantization), device=hardware.device)
            if not target.can_be(quantization):
                continue
            plain = replace(
                job, target=target, draft=None, own_tokenizer=False, draft_ranks=(), overlap=False, tree=None
            )
            for base in layouts(plain, num_ranks=hardware.num_ranks, divides=True, thorough=False):
                yield base
                for draft in drafts if fits(base, hardware) else ():
                    for drafted in on_block(replace(base, draft=draft), len(base.target_ranks)):
                        yield drafted
                        yield from _with_trees(drafted)
                        if drafted.draft_kind is DraftLayout.own_gpu:
                            yield replace(drafted, overlap=True)


def _in_formats(draft: ModelConfig, *, device: str) -> Iterator[PlannedModel]:
    """A draft, and the same in the storage format that a single row reads fastest; heads stay as they are."""
    plain = planned_model(draft, device=device)
    yield plain
    if plain.shape.is_head or format_of(plain.quantization).is_quantized:
        return
    unquantized, columns = 2 * 10**6, [matrix.num_columns for matrix in inventory(plain.shape).layer]
    read_bytes = {
        name: storage.read_bytes(1, storage.matrix_bytes(10**6, 2), unquantized, device=device)
        for name, storage in formats().items()
        if plain.can_be(name) and all(number % storage.least_group == 0 for number in columns)
    }
    fastest = min(read_bytes, key=read_bytes.__getitem__)
    if read_bytes[fastest] < unquantized:
        yield planned_model(replace(draft, quantization=fastest), device=device)


def _with_trees(job: PlanSpec) -> Iterator[PlanSpec]:
    """The job with a few trees, where a head drafts on ranks of the target."""
    if job.has_head and job.draft_kind in {DraftLayout.one_rank, DraftLayout.sharded} and job.batch_size <= FEW_ROWS:
        for tree in TREES:
            yield replace(job, tree=tree, num_draft_tokens=tree.num_nodes, adapts=False)


def _series(target: PlannedModel, known: list[ModelConfig]) -> list[ModelConfig]:
    """The model, and the smaller unquantized ones with the same name prefix (`llama2_`), family and vocabulary.

    A model that the catalogue lacks, of the hub or from a folder, is alone.
    """
    entry = next((each for each in known if each.name == target.name), None)
    if entry is None or entry.shape is None:
        return [
            ModelConfig(
                name=target.name, shape=target.shape, stored_dtype=target.stored, stored_format=target.stored_format
            )
        ]
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
    names = {*catalogue.smaller_relatives(model, known=known), *_heads_of(model, known), model.default_draft}
    found: dict[tuple[int, ...], ModelConfig] = {}
    for draft in sorted(known, key=lambda other: _prefix(other.name) != _prefix(model.name)):
        if draft.name in names and draft.shape:
            sizes = (draft.shape.num_hidden_layers, draft.shape.hidden_size, draft.shape.intermediate_size,
                     int(draft.shape.is_head))  # fmt: skip
            found.setdefault(sizes, draft)
    return list(found.values())


def _heads_of(model: ModelConfig, known: list[ModelConfig]) -> Iterator[str]:
    """Names of the heads that were trained for a model, or for one of its sizes where it is a folder."""
    entries = {each.name: each for each in known}
    for other in known:
        if not (model.shape and other.shape and other.shape.is_head) or model.shape.is_head:
            continue
        target = entries.get(other.target or "")
        if target is None:
            sizes = other.shape.target_hidden_size, other.shape.target_vocab_size
            fits = sizes == (model.shape.hidden_size, model.shape.vocab_size)
        else:
            trained_for = other.trained_for or target.hub_id
            fits = target.shape == model.shape and model.hub_id in {None, trained_for}
        if fits:
            yield other.name


_SECONDS_PER_HOUR, _MILLION = 3600, 10**6


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """One way to use a machine.

    Attributes:
        num_gpus: GPUs of a replica, over `num_nodes` nodes.
        num_replicas: replicas on all that is rented.
        batch_size: rows of each replica.
        num_draft_tokens: K; 0 for plain decoding, where a draft gains nothing.
        adapts: K is chosen for each round, up to this one.
        tree: the shape of drafted trees; None for chains.
        ms_per_token: of each completion while it is decoded.
        first_token_ms: of the prompts of a batch, for the draft too; where rows wait for other batches, of the last.
        ms_per_token_range, first_token_ms_range, usd_per_million_tokens_range: 80 % ranges; None without any.
        tokens_per_s: of all rows of all replicas, while decoding.
        run_tokens_per_s: the same with the time of the prompts, one batch after the other.
        usd_per_hour: of what is rented; None without a known price.
        usd_per_million_tokens: of new tokens, with the time of their prompts.
        is_tight: it fits with less than 3 % of a rank's memory left.
        reason: why the choice is ruled out; None if it is not.
        settings: those of the plan of this choice.
    """

    machine: str
    gpu: str
    num_gpus: int
    num_nodes: int
    num_replicas: int
    batch_size: int = 1
    quantization: str
    draft: str | None = None
    draft_quantization: str | None = None
    draft_kind: str | None = None
    num_draft_tokens: int = 0
    adapts: bool = False
    tree: str | None = None
    ms_per_token: float | None = None
    first_token_ms: float | None = None
    tokens_per_s: float | None = None
    run_tokens_per_s: float | None = None
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    ms_per_token_range: Ends | None = None
    first_token_ms_range: Ends | None = None
    usd_per_million_tokens_range: Ends | None = None
    needed_bytes: int | None = None
    capacity_bytes: int
    is_tight: bool = False
    reason: str | None = None
    settings: tuple[str, ...] = ()


def compare(config: PlanConfig, machines: Sequence[HardwareConfig]) -> list[MachineChoice]:
    """Price all choices on all machines for a checked config; the best by the objective first, those ruled out last.

    On a machine, the objective chooses too, among those within the limits of time.
    """
    ways = {device: _ways(config, machine) for device, machine in {one.device: one for one in machines}.items()}
    found = [
        _within(choice, config)
        for machine, sizes in _rented([_with_prices(machine, config.prices) for machine in machines])
        for choice in _of_machine(ways[machine.device], machine, config, sizes=sizes)
    ]
    return sorted(found, key=lambda choice: _rank(choice, config.order))


def _with_prices(machine: HardwareConfig, prices: Mapping[str, float]) -> HardwareConfig:
    """The machine with the price that a setting gives it, of a whole node."""
    if machine.name not in prices:
        return machine
    return replace(machine, price=Price(usd_per_hour={machine.num_gpus: prices[machine.name]}))


def _rented(machines: Iterable[HardwareConfig]) -> Iterator[tuple[HardwareConfig, list[int]]]:
    """Each machine with the numbers of its GPUs that are rented together; what several machines have is tried once."""
    seen: set[tuple[str, str, int]] = set()
    for machine in sorted(machines, key=lambda machine: machine.num_gpus):
        vendor = machine.price.vendor if machine.price else None
        sizes = {size for size in (machine.price.usd_per_hour if machine.price else ()) if size < machine.num_gpus}
        offers = {size: (machine.gpu, vendor or machine.name, size) for size in sorted({*sizes, machine.num_gpus})}
        yield machine, [size for size, offer in offers.items() if size == machine.num_gpus or offer not in seen]
        seen |= {*offers.values()}


def _within(choice: MachineChoice, config: PlanConfig) -> MachineChoice:
    """The choice, ruled out if it exceeds the limits."""
    ms, first_ms, usd, reason = choice.ms_per_token, choice.first_token_ms, choice.usd_per_hour, choice.reason
    if reason or ms is None or first_ms is None:
        return choice
    if config.max_ms_per_token is not None and ms > config.max_ms_per_token:
        reason = f"{ms:.2f} ms/token are more than max_ms_per_token={config.max_ms_per_token:g}"
    elif config.max_first_token_ms is not None and first_ms > config.max_first_token_ms:
        reason = f"{first_ms:.0f} ms to the first token are more than max_first_token_ms={config.max_first_token_ms:g}"
    elif config.max_price is not None and usd is None:
        reason = f"no price is known: prices={{{choice.machine}:USD_PER_HOUR}} gives one"
    elif config.max_price is not None and usd is not None and usd > config.max_price:
        reason = f"{usd:.2f} USD an hour are more than max_price={config.max_price:g}"
    return replace(choice, reason=reason)


def _rank(choice: MachineChoice, objective: Objective) -> tuple[Any, ...]:
    """Sort key; the price decides between equals, then the number of GPUs."""
    ms, rate = choice.ms_per_token or math.inf, choice.run_tokens_per_s or 0.0
    costs = choice.usd_per_million_tokens, choice.usd_per_hour
    price, hourly = (math.inf if cost is None else cost for cost in costs)
    by = {
        Objective.latency: ms, Objective.throughput: -rate, Objective.price: price, Objective.hourly: hourly
    }[objective]  # fmt: skip
    return choice.reason is not None, by, hourly, ms, choice.num_gpus, choice.machine


def nothing_left(choices: Sequence[MachineChoice]) -> str | None:
    """An error sentence if every choice is ruled out, with the one that comes closest; else None."""
    if any(choice.reason is None for choice in choices):
        return None

    def lacking(choice: MachineChoice) -> tuple[bool, float]:
        return choice.ms_per_token is None, (
            choice.ms_per_token or (choice.needed_bytes or math.inf) / choice.capacity_bytes
        )

    num_machines, nearest = len({choice.machine for choice in choices}), min(choices, key=lacking)
    which = f"{num_machines} machines" if num_machines > 1 else nearest.machine
    return f"nothing is left of {which}; the closest is {nearest.num_gpus} x {nearest.gpu}: {nearest.reason}"


def comparison_document(
    choices: Sequence[MachineChoice], config: PlanConfig, machines: Sequence[HardwareConfig]
) -> dict[str, Any]:
    """The comparison for JSON: the choices numbered by rank, the prices with their dates, and notes."""
    priced = [_with_prices(machine, config.prices) for machine in machines]
    models = [config.model, *([config.draft.model] if config.draft.model else [])]
    return {
        "objective": config.order.name,
        "model": config.model.name,
        **{name: getattr(config, name) for name in ("batch_size", "concurrency", "prompt_tokens", "max_new_tokens")},
        "prices": {
            machine.name: machine.price.document() | {"source": machine.sources.get("price.usd_per_hour")}
            for machine in priced
            if machine.price
        },
        "notes": [
            *notes_on_families(*models),
            *notes_on_guesses(config.search and choice.adapts and choice.reason is None for choice in choices),
        ],
        "machines": [{"rank": rank} | asdict(choice) for rank, choice in enumerate(choices, start=1)],
    }


MOST_DRAFTS = 3
"""Drafts that a search tries: the one asked for, heads, and the smallest of the catalogue with this vocabulary."""


def _ways(config: PlanConfig, machine: HardwareConfig) -> list[PlanSpec]:
    """The jobs to try on machines of one device, before they have ranks: that of the config, with draft and without.

    With search=true, for every storage format of the target, and with further drafts; by look-up where a text copies.
    """
    alone = replace(machine, num_gpus=1, num_nodes=1)
    asked = job_of_plan(replace(config, placement=PlacementConfig()), alone)
    plain = replace(asked, draft=None, free_draft=None, own_tokenizer=False, draft_ranks=())
    if not config.search:
        return [asked, plain] if asked.drafts else [plain]
    drafting = [asked] if asked.free_draft else []
    if config.speculation.text is TextKind.copy and asked.free_draft is None:
        drafting.append(replace(plain, free_draft=NGRAM_DRAFT))
    if not asked.own_tokenizer:
        drafting += [replace(plain, draft=draft, draft_ranks=(0,)) for draft in _drafts(config, asked)]
    elif asked.draft:
        drafting.append(asked)
    entries = {name: replace(config.model, quantization=name) for name in formats()}
    found = {name: planned_model(entry, device=asked.device) for name, entry in entries.items()}
    targets = [target for name, target in found.items() if target.can_be(name)]
    return [replace(job, target=target) for target in targets for job in (plain, *drafting)]


def _drafts(config: PlanConfig, asked: PlanSpec) -> list[PlannedModel]:
    """The draft that was asked for, the heads of the target, and the smallest entries that may share its vocabulary.

    Each is tried in the formats that may be faster, unless the format of the one that was asked for is given.
    """
    names = *_heads_of(config.model, catalogue.entries()), *catalogue.smaller_relatives(config.model)
    others = {name: catalogue.load(name) for name in names}
    asked_for = {asked.draft.name: config.draft.model} if asked.draft and config.draft.model else {}
    chosen = [*(asked_for | others).values()][:MOST_DRAFTS]
    return [draft for entry in chosen for draft in _in_formats(entry, device=asked.device)]


def _of_machine(
    ways: Sequence[PlanSpec], machine: HardwareConfig, config: PlanConfig, *, sizes: Sequence[int]
) -> list[MachineChoice]:
    """The choices on a node of each size, and on several nodes if the job fits none or the machine has several."""
    node, found = replace(machine, num_nodes=1), []
    for count in sorted({2**power for power in range(max(sizes).bit_length())} | {*sizes}):
        replicas = {size: 1 if machine.device == "cpu" else size // count for size in sizes if size >= count}
        most_rows = {size: _most_rows(config, number) for size, number in replicas.items()}
        priced = _priced(ways, replace(node, num_gpus=count), config, num_gpus=count, most_rows=most_rows.values())
        for size, num_replicas in replicas.items():
            rented = replace(node, num_gpus=count * num_replicas)
            best = _best(priced, config, most_rows[size])
            found += [_choice(replace(job, num_replicas=num_replicas), rented, config) for job in best]
    for num_nodes in sorted({2, MOST_NODES, machine.num_nodes} - {1}):
        has_room = any(choice.reason is None for choice in found)
        if num_nodes <= machine.num_nodes or (machine.network and not has_room):
            nodes = replace(machine, num_nodes=num_nodes)
            most_rows_of_all = [_most_rows(config, 1)]
            priced = _priced(ways, nodes, config, num_gpus=nodes.num_ranks, most_rows=most_rows_of_all)
            found += [_choice(job, nodes, config) for job in _best(priced, config, *most_rows_of_all)]
    return found


def _most_rows(config: PlanConfig, num_replicas: int) -> int:
    """Rows of each replica, if all are served at once."""
    return config.batch_size if config.concurrency is None else -(-config.concurrency // num_replicas)


def _batches(config: PlanConfig, most_rows: Collection[int]) -> list[int]:
    """The batch sizes to try, in order: those that serve all rows at once, in a search also 1, 4, 16, ... below."""
    if config.concurrency is None or not config.search:
        return sorted({*most_rows})
    return sorted(
        {*most_rows} | {4**power for power in range(max(most_rows).bit_length()) if 4**power < max(most_rows)}
    )


def _priced(
    ways: Sequence[PlanSpec], machine: HardwareConfig, config: PlanConfig,
    *,
    num_gpus: int, most_rows: Collection[int],
) -> list[_Priced]:  # fmt: skip
    """The best job for each batch size and storage format on a replica of `num_gpus` GPUs; if none fits, the nearest.

    A draft gains less with every row: larger batches try only those that were best in the batch before.
    """
    found: list[_Priced] = []
    tried = ways
    for rows in _batches(config, most_rows):
        best: dict[str, _Priced] = {}
        for way in tried:
            placed = [*on_block(replace(way, batch_size=rows), num_gpus)]
            for job in chain(placed, *map(_with_trees, placed if config.search else ())):
                name = job.target.quantization
                below = best[name].cost if name in best else NO_COST
                priced = _price(job, machine, chooses_k=config.search, config=config, below=below)
                if priced and (name not in best or priced.order < best[name].order):
                    best[name] = priced
        found += best.values()
        drafts = [(one.job.target, one.job.draft, one.job.free_draft) for one in best.values()]
        tried = [way for way in tried if not way.drafts or (way.target, way.draft, way.free_draft) in drafts]
    return found


def _best(priced: Iterable[_Priced], config: PlanConfig, num_rows: int) -> list[PlanSpec]:
    """The best job for each storage format of those that serve up to `num_rows` rows of a replica at once."""
    best: dict[str, _Priced] = {}
    for one in priced:
        name = one.job.target.quantization
        if one.job.batch_size > num_rows or (one.job.batch_size < num_rows and not config.search):
            continue
        if one.timed and one.reason is None:
            one = replace(one, cost=_cost(one.job, one.timed, one.token_s, config, num_rows))  # noqa: PLW2901
        if name not in best or one.order < best[name].order:
            best[name] = one
    return [one.job for one in best.values()]


def _choice(job: PlanSpec, machine: HardwareConfig, config: PlanConfig) -> MachineChoice:
    """A job as it is, priced on what is rented."""
    priced = _price(job, machine, chooses_k=False)
    assert priced, "nothing is faster than an unlimited time"
    return MachineChoice(
        machine=machine.name, gpu=machine.gpu, num_gpus=len(job.layout.ranks), num_nodes=machine.num_nodes,
        capacity_bytes=machine.rank_bytes, settings=tuple(_settings(job, machine, config)),
        **_costs(priced, machine, config), **priced.figures(),
    )  # fmt: skip


def _costs(priced: _Priced, machine: HardwareConfig, config: PlanConfig) -> dict[str, Any]:
    """First token, tokens/s with the prompts, US dollars per hour and per token as far as a price is known; ranges."""
    timed, hourly = priced.timed, machine.usd_per_hour
    if priced.reason or timed is None:
        return {}
    run_s = timed.plain_run_s if timed.speculative_run_s is None else timed.speculative_run_s
    token_range = timed.plain_s_range if timed.speculative_s is None else timed.speculative_s_range
    tokens_per_s = priced.job.num_replicas * priced.job.batch_size / run_s
    million = None if hourly is None else hourly * _MILLION / (tokens_per_s * _SECONDS_PER_HOUR)
    num_earlier = _num_earlier(priced.job, _most_rows(config, priced.job.num_replicas))
    waits, prompts, runs = num_earlier * priced.job.max_new_tokens, timed.prefill_s_range, timed.run_s_range
    first = prompts and runs and (prompts[0] + waits * runs[0], prompts[1] + waits * runs[1])
    return {
        "first_token_ms": 1e3 * (timed.prefill_s + waits * run_s),
        "run_tokens_per_s": tokens_per_s,
        "usd_per_hour": hourly,
        "usd_per_million_tokens": million,
        "ms_per_token_range": token_range and times(1e3, token_range),
        "first_token_ms_range": first and times(1e3, first),
        "usd_per_million_tokens_range": million and runs and times(million / run_s, runs),
    }


def _settings(job: PlanSpec, machine: HardwareConfig, config: PlanConfig) -> Iterator[str]:
    """The settings of this choice, next to those that chose the models and the prices."""
    yield f"hardware={machine.name}"
    if not has_its_own_number(machine):
        yield f"hardware.num_gpus={machine.num_gpus}"
    if machine.num_nodes > 1:
        yield f"hardware.num_nodes={machine.num_nodes}"
    if job.batch_size != config.batch_size:
        yield f"batch_size={job.batch_size}"
    if job.target.setting != config.model.quantization:
        yield f"model.quantization={job.target.setting}"
    yield f"draft={(job.draft.name if job.draft else job.free_draft) or 'none'}"
    yield from _of_choice(job)

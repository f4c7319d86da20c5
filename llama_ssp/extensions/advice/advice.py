"""Advice of a plan: choices that cannot gain, and changes that would fit.

Changes are judged by what the user loses:

    nothing     the draft is on other ranks, has fewer bits, is another one, or none: the text has the same
    distribution;
              other layers on each stage; no CUDA graphs, which takes time alone
    little    linear layers in 8 bits, fewer rows at a time
    more      linear layers in 4 bits, a shorter prompt, more GPUs or nodes, another machine
    model     a smaller target, if nothing else fits

At most three changes are named, one of each kind, ordered by loss, then with a draft first, by number of settings, and
by speed. A change is left out if its plan has a warning that the asked plan does not have.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from llama_ssp import catalogue
from llama_ssp.architectures.family import inventory
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import PlacementError
from llama_ssp.extensions.advice.search import (
    MOST_NODES,
    by_length,
    in_formats,
    length_setting,
    moved,
    placement_settings,
)
from llama_ssp.machines import hardware as machines
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import RankMemoryPlan, fits, fullest_rank, largest_batch, largest_context
from llama_ssp.planning.model import planned_model
from llama_ssp.planning.printed import accepted, accepting
from llama_ssp.planning.spec import PlanSpec, block_sizes, on_block, without_draft
from llama_ssp.planning.timing import Timing, timing
from llama_ssp.settings.drafters import SAME
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.storage.formats import OWN_DTYPE, formats
from llama_ssp.text.messages import counted, rounded, said

WORTHWHILE_GAIN, CLEAR_GAIN = 1.03, 1.1


def warnings(spec: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """Choices that cost more than they gain, each with a better one."""
    yield from _of_formats(spec, hardware) if hardware.device == "cuda" else ()
    yield from _of_free_draft(spec, timed) if spec.free_draft and not spec.draft else ()
    if spec.draft is None or timed.speedup is None or timed.best_num_draft_tokens is None:
        return
    asked, number = timed.speedup, timed.best_num_draft_tokens
    best = timed.plain_s / timed.by_num_draft_tokens[number - 1]
    better = _better_place(spec, hardware, best)
    if asked <= 1:
        alone = len(spec.draft_ranks) == 1 < len(spec.target_ranks)
        where = f"{'alone ' if alone else ''}on {_place(hardware, len(spec.draft_ranks))}"
        verb, most = ("cannot gain", "no K gains") if best <= 1 else ("loses", f"the best, K={number}, {best:.2f}x")
        yield (
            f"the draft {verb}: {spec.draft.label} {where} costs {timed.cost_ratio:.2f} of a step of "
            f"{spec.target.label} on {_place(hardware, len(spec.target_ranks))}; "
            f"K={timed.num_draft_tokens} gives {asked:.2f}x, {most}{better}"
        )
    elif better:
        yield f"the draft would gain more elsewhere: {asked:.2f}x here{better}"
    elif best / asked >= WORTHWHILE_GAIN and not spec.adapts and timed.knows_best_k:
        setting = length_setting(replace(spec, tree=None, num_draft_tokens=number))
        yield from [f"K={spec.num_draft_tokens} gives {asked:.2f}x; {setting} gives {best:.2f}x"] * accepted(setting)


def _of_formats(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[str]:
    for model, setting in ((spec.target, "model.dtype"), (spec.draft, "draft.model.dtype")):
        fp16 = said(setting, Dtype.fp16.name)
        if model and model.dtype.name not in hardware.flops_per_s and accepted(fp16):
            yield f"a {hardware.gpu} does not multiply in {model.dtype.name}: {fp16} does"
    if spec.draft and (advice := spec.draft.storage.draft_advice):
        yield advice.format(dtype=spec.draft.dtype.name)
    if advice := spec.target.storage.target_advice:
        yield advice.format(dtype=spec.target.dtype.name)


def _of_free_draft(spec: PlanSpec, timed: Timing) -> Iterator[str]:
    if timed.speedup is None or timed.speedup > 1 or spec.adapts:  # what chooses K goes on without drafts
        return
    best = timed.plain_s / min(timed.by_num_draft_tokens, default=math.inf)
    most = f", the best, K={timed.best_num_draft_tokens}, {best:.2f}x" if best > 1 else ""
    yield f"draft={spec.free_draft} loses: K={timed.num_draft_tokens} gives {timed.speedup:.2f}x{most}"


def _place(hardware: HardwareConfig, num_ranks: int) -> str:
    is_whole = hardware.device == "cpu" and num_ranks == 1 == hardware.num_gpus
    return "one machine" if is_whole else counted(num_ranks, hardware.unit)


def _better_place(spec: PlanSpec, hardware: HardwareConfig, best: float) -> str:
    """Return a clause about sharding the draft like the target, if that gains clearly more than the best K here."""
    if spec.draft_kind is DraftLayout.sharded or len(spec.target_ranks) == 1:
        return ""
    other = replace(spec, draft_kind=DraftLayout.sharded, draft_ranks=spec.target_ranks)
    settings = placement_settings(replace(other, num_replicas=1))
    try:
        sharded = timing(other, hardware)
    except PlacementError:
        return ""
    if sharded.speedup is None or sharded.speedup < CLEAR_GAIN * best or not accepted(*settings):
        return ""
    return f"; {' '.join(settings)} costs {sharded.cost_ratio:.2f} and gives {sharded.speedup:.2f}x"


def better_draft(spec: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """Yield a sentence about the smaller draft of the catalogue that gains most, if it clearly beats this one."""
    is_given = spec.acceptance is not None  # a figure of this pair alone
    if spec.draft is None or is_given or spec.vocabulary is not SAME or spec.tree or not timed.by_num_draft_tokens:
        return
    asked, gains = inventory(spec.draft.shape).num_parameters, {1.0: ""}
    for draft in (planned_model(catalogue.load(name), device=spec.device) for name in _smaller(spec.target.name)):
        other = replace(spec, draft=draft)
        if inventory(draft.shape).num_parameters < asked and fits(other, hardware):
            found = timing(other, hardware)
            gains[found.plain_s / min(found.by_num_draft_tokens)] = draft.name
    here, most = timed.plain_s / min(timed.by_num_draft_tokens), max(gains)
    if gains[most] and most >= CLEAR_GAIN * here and accepted(f"draft={gains[most]}"):
        yield (
            f"draft={gains[most]} is forecast to give {most:.2f}x with its best K, {spec.draft.label} {here:.2f}x with "
            "its own"
        )


def same_kind(spec: PlanSpec, size: int) -> PlanSpec | None:
    """Lay the spec out on `size` GPUs, its stages and draft as before; None if it does not fit there."""
    if size % spec.num_stages:
        return None
    kinds = {DraftLayout.one_rank} if size == spec.num_stages else {spec.draft_kind}
    placed = on_block(spec, size, num_stages=spec.num_stages)
    return next((found for found in placed if not spec.draft or found.draft_kind in kinds), None)


def faster_on_fewer(spec: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """Yield a sentence if replicas on fewer ranks each, all ranks in use, decode the same rows clearly faster."""
    size, best_spec, best = len(spec.layout.ranks), spec, timed
    if spec.backend.by_library or size == 1:
        return
    for smaller in block_sizes(size)[1:]:
        times = size // smaller
        rows = replace(spec, batch_size=-(-spec.batch_size // times), num_replicas=spec.num_replicas * times)
        found = same_kind(rows, smaller)
        if found is None or not fits(found, hardware):
            break
        faster = timing(found, hardware)
        if best_spec is not spec and faster.best_s >= best.best_s:
            break
        best_spec, best = found, faster
    fewer = [f"batch_size={best_spec.batch_size}"] * (best_spec.batch_size != spec.batch_size)
    settings = f"placement.num_replicas={best_spec.num_replicas}", *fewer, *moved(spec, best_spec)
    if best_spec is not spec and timed.best_s >= CLEAR_GAIN * best.best_s and accepted(*settings):
        yield _sentence(spec, hardware, timed, best_spec, best, settings=" ".join(settings))


def _sentence(
    spec: PlanSpec, hardware: HardwareConfig, timed: Timing, best_spec: PlanSpec, best: Timing, *, settings: str
) -> str:
    all_ranks, size = len(spec.layout.ranks), len(best_spec.layout.ranks)
    all_nodes, num_nodes = (-(-count // hardware.num_gpus) for count in (all_ranks, size))
    is_node = all_nodes > 1 and size == hardware.num_gpus * num_nodes
    number, of_all, unit = (num_nodes, all_nodes, "node") if is_node else (size, all_ranks, hardware.unit)
    where, verb = counted(number, unit), "is" if number == 1 else "are"
    num_replicas, rows = best_spec.num_replicas, best_spec.batch_size
    total = rows * num_replicas / best.best_s
    if spec.batch_size > 1:
        here = spec.num_rows / timed.best_s
        return (
            f"replicas would serve the batch better: {num_replicas}, each on {where} with {counted(rows, 'row')}, "
            f"decode {rounded(total, 4)} tokens/s at {_times(best)}, here {rounded(here, 4)} at {_times(timed)}: "
            f"{settings}"
        )
    return (
        f"{where} {verb} faster than all {of_all}: {_times(best)}, here {_times(timed)}; {settings} "
        f"uses all for {rounded(total, 4)} tokens/s"
    )


def _times(timed: Timing) -> str:
    plain = f"{rounded(1e3 * timed.plain_s)} ms/token"
    if timed.speculative_s is None:
        return plain
    return f"{plain} plain and {rounded(1e3 * timed.speculative_s)} with the draft"


MOST_CHANGES = 3
EIGHT_BITS = 3
"""Largest `StorageFormat.change_weight` of a format that loses little."""


class Loss(IntEnum):
    """Losses by a change, the least first."""

    nothing = 0
    little = 1
    more = 2
    model = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings to add to the command line, the spec and the machine that they lead to, and what its plan says.

    Attributes:
        kind: the kind of the change; at most one change of each kind is named.
    """

    kind: str
    loss: Loss
    settings: tuple[str, ...] = ()
    spec: PlanSpec
    hardware: HardwareConfig

    def then(self, *settings: str, spec: PlanSpec) -> "Change":
        """Return the change with more settings, which lead to `spec`."""
        return replace(self, settings=(*self.settings, *settings), spec=spec)

    @cached_property
    def fullest(self) -> RankMemoryPlan:
        """The fullest rank."""
        return fullest_rank(self.spec, self.hardware)

    @cached_property
    def timed(self) -> Timing:
        """The times of a completion."""
        return timing(self.spec, self.hardware)

    @property
    def faults(self) -> set[str]:
        """The warnings of the change's plan, without figures; that another K gains more is no fault."""
        with accepting(lambda _settings, _is_whole: True):  # what the asked command takes says nothing of this one
            found = [*warnings(self.spec, self.hardware, self.timed)]
        return {sentence.partition(":")[0] for sentence in found if not sentence.startswith("K=")}

    @property
    def has_room(self) -> bool:
        """Whether the change leaves some memory free, so that a larger machine is not tight again."""
        return fits(self.spec, self.hardware) and not self.fullest.is_tight

    @property
    def order(self) -> tuple[int, bool, int, bool, float]:
        """Sort key of changes, the best first; of changes that lose as much, draft=none comes last."""
        row_s = self.timed.best_s / self.spec.num_rows
        return self.loss, "draft=none" in self.settings, len(self.settings), self.fullest.is_tight, row_s

    def document(self) -> dict[str, Any]:
        """Return the change for JSON, with ms/token of the faster mode, and tokens/s of all rows and replicas."""
        return {
            "settings": self.settings,
            "loss": self.loss.name,
            "needed_bytes": self.fullest.needed_bytes,
            "ms_per_token": 1e3 * self.timed.best_s,
            "tokens_per_s": 1 / self.order[-1],
            "is_tight": self.fullest.is_tight,
        }


def changes_that_fit(spec: PlanSpec, hardware: HardwareConfig) -> list[Change]:
    """Return up to three changes that make a plan fit, the best first; empty if nothing that was tried fits."""
    known = Change(kind="", loss=Loss.nothing, spec=spec, hardware=hardware).faults
    candidates = _fitting(_ways(spec, hardware))
    if not any(one.loss <= Loss.little for one in candidates):
        for step in _formats(spec, hardware):  # fewer bits and more ranks together
            both = (
                replace(more, settings=(*step.settings, *more.settings)) for more in _more_ranks(step.spec, hardware)
            )
            candidates += _fitting(_first_with_room(both))
    return _chosen(candidates, known) or _chosen(_fitting(_smaller_targets(spec, hardware)), known)


def _chosen(candidates: list[Change], known: set[str]) -> list[Change]:
    """Return the best change of each kind, `MOST_CHANGES` at most.

    A change counts only if its plan has no warning that the asked plan does not have (`known`).
    """
    chosen: dict[str, Change] = {}
    for candidate in sorted(candidates, key=lambda one: one.order):
        if len(chosen) == MOST_CHANGES:
            break
        if candidate.kind not in chosen and (accepted := _accepted(candidate, known)):
            chosen[candidate.kind] = accepted
    return sorted(chosen.values(), key=lambda one: one.order)


def _fitting(ways: Iterable[Change]) -> list[Change]:
    return [way for way in ways if fits(way.spec, way.hardware)]


def _accepted(change: Change, known: set[str]) -> Change | None:
    """Return the change, or else the change with the best K, if its plan has no warning beyond `known`; else None."""
    if not accepted(*change.settings):
        return None
    if change.faults <= known:
        return change
    if change.timed.best_num_draft_tokens is None or change.spec.adapts:
        return None
    _, drafting = next(by_length(change.spec, change.timed))
    better = _fitting([change.then(length_setting(drafting), spec=drafting)])
    return next((one for one in better if one.faults <= known and accepted(*one.settings)), None)


def _ways(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[Change]:
    if spec.layers:
        counts = tuple(map(len, replace(spec, layers=None).stages))
        numbers = f"placement.target.layers=[{','.join(map(str, counts))}]"
        shared = replace(spec, layers=counts)
        yield Change(kind="layers", loss=Loss.nothing, settings=(numbers,), spec=shared, hardware=hardware)
    yield from _drafts(spec, hardware)
    if spec.cuda_graphs:
        without = replace(spec, cuda_graphs=False)
        yield Change(kind="graphs", loss=Loss.nothing, settings=("cuda_graphs=false",), spec=without, hardware=hardware)
    yield from _sizes(spec, hardware)
    for step in _formats(spec, hardware):
        yield from _placed(step)
    if spec.target.cache_dtype == OWN_DTYPE:
        narrow = replace(spec, target=replace(spec.target, cache_dtype="int8"))
        start = Change(kind="cache", loss=Loss.little, spec=spec, hardware=hardware)
        yield start.then("model.cache_dtype=int8", spec=narrow)
    yield from _first_with_room(_more_ranks(spec, hardware))
    yield from _first_with_room(_other_machines(spec, hardware))


def _placed(step: Change) -> Iterator[Change]:
    """Yield the change as it is, with each other placement of the draft, and without a draft."""
    yield step
    spec = step.spec
    if spec.draft is None:
        return
    size = len(spec.layout.ranks if spec.num_stages == 1 else spec.target_ranks)
    places = () if spec.backend.by_library else on_block(spec, size, num_stages=spec.num_stages)
    others = [other for other in places if other.layout != spec.layout]
    for other in others:
        yield step.then(*placement_settings(replace(other, num_replicas=1)), spec=other)
    kept = tuple(setting for setting in step.settings if not setting.startswith("placement.draft."))
    yield replace(step, settings=kept).then("draft=none", spec=without_draft(spec))


def _drafts(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[Change]:
    if spec.draft is None:
        return
    start = Change(kind="draft", loss=Loss.nothing, spec=spec, hardware=hardware)
    for way in _placed(start):
        if way.settings:
            yield replace(way, kind="placement") if way.spec.draft else way
    smaller = (planned_model(catalogue.load(name), device=spec.device) for name in _smaller(spec.draft.name))
    for draft, settings in ((spec.draft, ()), *((other, (f"draft={other.name}",)) for other in smaller)):
        for one in in_formats(draft, device=spec.device):
            packed = [] if one is draft else [f"draft.model.quantization={one.quantization}"]
            if added := (*settings, *packed):
                yield from (way for way in _placed(start.then(*added, spec=replace(spec, draft=one))) if way.spec.draft)


def _sizes(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[Change]:
    """Yield changes to fewer rows or a shorter prompt, with each placement of the draft."""
    for way in _placed(Change(kind="batch", loss=Loss.little, spec=spec, hardware=hardware)):
        if spec.batch_size > 1 and replace(way, spec=replace(way.spec, batch_size=1)).has_room:
            rows = largest_batch(way.spec, hardware, limit=spec.batch_size)
            if rows < spec.batch_size:
                fewer = replace(way.spec, batch_size=rows)
                yield replace(way, settings=(f"batch_size={rows}", *way.settings), spec=fewer)
        if replace(way, spec=replace(way.spec, prompt_tokens=1)).has_room:
            prompt = largest_context(way.spec, hardware) - spec.max_new_tokens
            if prompt < spec.prompt_tokens:
                settings, shorter = (f"prompt_tokens={prompt}", *way.settings), replace(way.spec, prompt_tokens=prompt)
                yield replace(way, kind="context", loss=Loss.more, settings=settings, spec=shorter)


def _formats(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[Change]:
    target, short = spec.target, spec.target.stored
    start = Change(kind="precision", loss=Loss.little, spec=spec, hardware=hardware)
    if spec.device == "cpu" and target.dtype is Dtype.fp32 and short in {Dtype.bf16, Dtype.fp16}:
        # Slower, but halves everything that a CPU keeps in fp32 for 16-bit files.
        yield start.then(f"model.dtype={short.name}", spec=replace(spec, target=replace(target, dtype=short)))
    now = target.storage.change_weight or 0
    for storage in formats().values():
        is_other = storage.name != target.quantization and (storage.change_weight or 0) >= now
        if storage.change_weight is not None and is_other and target.can_be(storage.name):
            loss = Loss.little if storage.change_weight <= EIGHT_BITS else Loss.more
            other = replace(spec, target=target.quantized(storage.name))
            yield replace(start, loss=loss).then(f"model.quantization={storage.name}", spec=other)


def _more_ranks(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[Change]:
    if spec.backend.is_layer_wise:  # one rank has the GPUs of one node already
        return
    start = Change(kind="ranks", loss=Loss.more, spec=spec, hardware=hardware)
    used, known = len(spec.layout.ranks), hardware.num_gpus
    if hardware.device == "cuda":
        known = max(known, machines.entry_of(hardware.name)[1])
    if hardware.num_nodes == 1:
        for size in sorted(block_sizes(known // spec.num_replicas)):
            if size > used and (larger := same_kind(spec, size)):
                num_gpus = size * spec.num_replicas
                setting = "placement.target.tp_size" if num_gpus <= hardware.num_gpus else "hardware.num_gpus"
                machine = replace(hardware, num_gpus=max(num_gpus, hardware.num_gpus))
                yield replace(start, hardware=machine).then(f"{setting}={num_gpus}", *moved(spec, larger), spec=larger)
    for num_nodes in range(hardware.num_nodes + 1, MOST_NODES + 1) if hardware.network else ():
        if larger := same_kind(spec, hardware.num_gpus * num_nodes // spec.num_replicas):
            machine = replace(hardware, num_nodes=num_nodes)
            settings = f"hardware.num_nodes={num_nodes}", *moved(spec, larger)
            yield replace(start, hardware=machine).then(*settings, spec=larger)


def _other_machines(spec: PlanSpec, hardware: HardwareConfig) -> list[Change]:
    """Return the spec on each other machine of the catalogue, by number of GPUs, then by memory, the least first."""
    if hardware.device != "cuda" or spec.backend.by_library:
        return []
    found, is_as_named = [], machines.entry_of(hardware.name)[0] == hardware.num_gpus
    has_own_memory = is_as_named and machines.load(hardware.name).memory_bytes != hardware.memory_bytes
    for machine in machines.choices():
        size, rest = divmod(machine.num_gpus, spec.num_replicas)
        if machine.device != "cuda" or machine.gpu == hardware.gpu or rest or not (other := same_kind(spec, size)):
            continue
        settings = [f"hardware={machine.name}"]
        settings += [] if is_as_named else [f"hardware.num_gpus={machine.num_gpus}"]
        settings += ["hardware.num_nodes=1"] if hardware.num_nodes > 1 else []
        settings += [f"hardware.memory_bytes={machine.memory_bytes}"] if has_own_memory else []
        start = Change(kind="machine", loss=Loss.more, spec=spec, hardware=machine)
        found.append(start.then(*settings, *moved(spec, other), spec=other))
    return sorted(found, key=lambda way: (way.hardware.num_gpus, way.hardware.memory_bytes))


def _first_with_room(steps: Iterable[Change]) -> list[Change]:
    """Return all placements of the draft in the first change that leaves some memory free in one of them."""
    placed = ([*_placed(step)] for step in steps)
    return next((ways for ways in placed if any(way.has_room for way in ways)), [])


def _smaller_targets(spec: PlanSpec, hardware: HardwareConfig) -> list[Change]:
    """Return changes to the largest smaller target that fits; the draft is kept only if it is smaller still."""
    steps = []
    for name in reversed(_smaller(spec.target.name)):
        target = planned_model(catalogue.load(name), device=spec.device)
        other, settings = replace(spec, target=replace(target, by_library=spec.target.by_library)), [f"model={name}"]
        if spec.draft and spec.draft.name not in _smaller(name):
            other = without_draft(other)
            settings.append("draft=none")
        steps.append(Change(kind="target", loss=Loss.model, settings=tuple(settings), spec=other, hardware=hardware))
    return _first_with_room(steps)


def _smaller(name: str) -> list[str]:
    """Smaller models of the same family and vocabulary, the smallest first."""
    return catalogue.smaller_relatives(catalogue.load(name)) if name in catalogue.names("model") else []

"""Measures rounds before a run begins that adapts K or overlaps drafting, and gives the decoder what it found.

All ranks use the times that rank 0 measured. A run folder keeps them for when the run is resumed.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import linear_regression, median
from typing import TypeVar

from llama_ssp.architectures.sizes import CATCH_UP_CHUNK
from llama_ssp.errors import ConfigError
from llama_ssp.planning.acceptance import expected, pair_of_run
from llama_ssp.planning.timing import OverlappedTime, better_to_wait
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import raise_on_all_ranks
from llama_ssp.reports.folder import COSTS_FILE, OVERLAP_FILE, RunFolder
from llama_ssp.reports.reading import read_json, restore
from llama_ssp.settings.schema import ADAPTIVE_LENGTHS, RunConfig, WeightsKind
from llama_ssp.speculate.engine.adaptive import AdaptiveLength, RoundCosts
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.overlap import OverlappedRound
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request

_NUM_WARM, _NUM_TIMED, _ENOUGH_S = 2, 16, 2.0
_NUM_WARM_PIECES, _NUM_TIMED_PIECES = 3, 8
_Read = TypeVar("_Read")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _RoundCost:
    num_tokens: int
    source: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """The content of `round_costs.json`; see `RoundCosts`."""

    rounds: list[_RoundCost]
    catch_up_seconds: list[float]


def make_ready(
    decoder: Decoder, requests: Sequence[Request], config: RunConfig, *, comm: Comm, folder: RunFolder | None = None
) -> None:
    """Make caches for requests, and `tune` the decoder; all ranks must call this together."""
    decoder.make_room(requests)
    longest = max(len(request.prompt_ids) + request.max_new_tokens // 2 for request in requests)
    tune(decoder, config, comm=comm, num_slots=longest, folder=folder)


def tune(decoder: Decoder, config: RunConfig, *, comm: Comm, num_slots: int, folder: RunFolder | None = None) -> None:
    """Measure, once for a decoder, the costs by which it chooses K for each round, or how overlapped rounds go on.

    All ranks must call this together, after `make_room`; most decoders have no such choice. `comm` has all ranks. A
    round in the middle of the run reads `num_slots` cache slots. On rank 0, `folder` is the run folder that has the
    measurement or will have it. Raises ConfigError on every rank if the folder's is damaged, and SspError if it cannot
    be written.
    """
    if config.speculation.adapts and decoder.round.drafters and not isinstance(decoder.length, AdaptiveLength):
        sources = range(len(decoder.round.drafters))
        choices = [DraftChoice(0), *(DraftChoice(number, source) for source in sources for number in ADAPTIVE_LENGTHS)]
        costs = _kept_or_measured(
            folder, COSTS_FILE, comm, read=lambda text: _read_costs(text, choices),
            measure=lambda: _measure_costs(decoder, choices, comm=comm, num_slots=num_slots),
        )  # fmt: skip
        first = ""
        with raise_on_all_ranks(comm):
            first = json.dumps(_expected_acceptance(config))
        # Hosts may have measured other pairs, and all ranks must choose the same K.
        decoder.length = AdaptiveLength(costs, acceptance=json.loads(comm.broadcast_text(first, src=0)))
    round_ = decoder.round
    if isinstance(round_, OverlappedRound) and round_.waits is None:
        round_.waits = _kept_or_measured(
            folder, OVERLAP_FILE, comm, read=_read_waits,
            measure=lambda: _choose_waits(decoder, config, comm=comm, num_slots=num_slots),
        )  # fmt: skip
        _log.info("after a rejection: %s", "waits for a block" if round_.waits else "verifies one token early")


def _kept_or_measured(
    folder: RunFolder | None, name: str, comm: Comm, *, read: Callable[[str], _Read], measure: Callable[[], str]
) -> _Read:
    """The measurement in a file of the run folder, the same on every rank; `measure` makes a file that is missing."""
    kept = None
    with raise_on_all_ranks(comm):
        kept = folder.read_kept(name) if folder else None
        if kept is not None:
            read(kept)
    kept = comm.broadcast_text(kept or "", src=0)
    if not kept:
        kept = comm.broadcast_text(measure(), src=0)
        with raise_on_all_ranks(comm):
            if folder:
                folder.write_kept(name, kept)
    return read(kept)


def _expected_acceptance(config: RunConfig) -> list[float]:
    """Of each drafter, before anything is drafted."""
    pair = pair_of_run(config)
    first = expected(pair).probability
    if config.weights is WeightsKind.synthetic:
        first = config.synthetic.agreement
    if config.speculation.acceptance is not None:
        first = config.speculation.acceptance
    fallback = config.draft.fallback
    behind = [expected(replace(pair, draft=fallback, has_model=False)).probability] if fallback else []
    return [first, *behind]


def _measure_costs(decoder: Decoder, choices: list[DraftChoice], *, comm: Comm, num_slots: int) -> str:
    """Time rounds of every choice in turns, and take the fastest of each; see `_on_a_line`."""
    sources = range(len(decoder.round.drafters))
    behind = [DraftChoice(1, source, num_unread=2 + CATCH_UP_CHUNK) for source in sources]
    seconds: list[list[float]] = []
    started = time.perf_counter()
    for repetition in range(_NUM_WARM + _NUM_TIMED):
        took = decoder.time_rounds([*choices, *behind], num_slots=num_slots)
        if repetition >= _NUM_WARM:
            seconds.append(took)
            is_enough = time.perf_counter() - started > _ENOUGH_S
            if comm.broadcast_text("enough" if is_enough else "", src=0):
                break
    fastest = dict(zip([*choices, *behind], map(min, zip(*seconds, strict=True)), strict=True))
    catch_up = [max(fastest[choice] - fastest[DraftChoice(1, choice.source)], 0.0) for choice in behind]
    costs = {DraftChoice(0): fastest[DraftChoice(0)]}
    for source in sources:
        costs |= _on_a_line({choice: fastest[choice] for choice in choices[1:] if choice.source == source})
    rounds = [_RoundCost(num_tokens=choice.num_tokens, source=choice.source, seconds=s) for choice, s in costs.items()]
    return json.dumps(asdict(_Costs(rounds=rounds, catch_up_seconds=catch_up)), indent=1) + "\n"


def _on_a_line(seconds: dict[DraftChoice, float]) -> dict[DraftChoice, float]:
    """Smooth the times of a drafter's rounds: each drafted token costs a draft step and a row of verification."""
    lengths = [choice.num_tokens for choice in seconds]
    slope, first = linear_regression(lengths, [*seconds.values()])
    least = min(seconds.values()) / 2
    return {choice: max(first + slope * choice.num_tokens, least) for choice in seconds}


def _read_costs(text: str, choices: list[DraftChoice]) -> RoundCosts:
    remedy = "delete it to measure again"
    try:
        costs = restore(_Costs, read_json(text))
    except ValueError as error:
        raise ConfigError(f"{COSTS_FILE} of run_dir is damaged ({error}): {remedy}") from None
    rounds = {DraftChoice(cost.num_tokens, cost.source): cost.seconds for cost in costs.rounds}
    num_sources = choices[-1].source + 1
    if [*rounds] != choices or min(rounds.values()) <= 0 or len(costs.catch_up_seconds) != num_sources:
        raise ConfigError(f"{COSTS_FILE} of run_dir lacks the cost of a round of this run: {remedy}")
    return RoundCosts(rounds=rounds, catch_up=tuple(costs.catch_up_seconds))


def _choose_waits(decoder: Decoder, config: RunConfig, *, comm: Comm, num_slots: int) -> str:
    """Choose how rounds go on after a rejection by what both models take."""
    pieces = measure_pieces(decoder, comm=comm, num_slots=num_slots)
    with raise_on_all_ranks(comm):
        waits = better_to_wait(
            pieces, acceptance=_expected_acceptance(config)[0], num_draft_tokens=decoder.round.num_ahead + 1,
            batch_size=decoder.batch_size,
        )  # fmt: skip
        measured = {name: getattr(pieces, name) for name in ("draft_s", "forward_s", "exchange_s", "refill_s")}
        return json.dumps({"waits": waits} | measured, indent=1) + "\n"


def measure_pieces(decoder: Decoder, *, comm: Comm, num_slots: int) -> OverlappedTime:
    """The fields of `OverlappedTime` that decide, over some rounds.

    Seconds of K draft steps and of the target's forward, each while the other goes on, and what the whole round and a
    block before it take in addition. Rounds with and without that block take turns: the speed of a machine may change
    from one second to the next.
    """
    choices = decoder.length.choices[:1]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    worked: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_NUM_WARM_PIECES + _NUM_TIMED_PIECES):
        for refills in (False, True):
            seconds[refills] += decoder.time_rounds(choices, num_slots=num_slots, refills=refills)
            worked[refills].append(decoder.worked_s)
    timed = slice(_NUM_WARM_PIECES, None)
    round_s, worked_s = median(seconds[False][timed]), median(worked[False][timed])
    pairs = zip(seconds[True][timed], seconds[False][timed], strict=True)
    refill_s = max(median(with_block - without for with_block, without in pairs), 0.0)
    drafts = decoder.round.drafts_here
    each = [json.loads(text) for text in comm.gather_text(json.dumps([drafts, worked_s]))]
    draft_s, forward_s = (max(s for of_draft, s in each if of_draft is is_draft) for is_draft in (True, False))
    exchange_s = max(round_s - max(draft_s, forward_s), 0.0)
    return OverlappedTime(draft_s=draft_s, forward_s=forward_s, exchange_s=exchange_s, refill_s=refill_s)


def _read_waits(text: str) -> bool:
    try:
        content = read_json(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("waits"), bool):
        raise ConfigError(f"{OVERLAP_FILE} of run_dir is damaged: delete it to measure again")
    return bool(content["waits"])

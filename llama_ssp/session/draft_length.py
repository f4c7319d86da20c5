"""Measures what rounds cost before a run begins that adapts or overlaps, and gives the decoder these constants.

All ranks use the costs that rank 0 measured. A run folder keeps them for when the run is resumed.
"""

import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import linear_regression, median
from typing import Any

from llama_ssp.architectures.sizes import CATCH_UP_CHUNK
from llama_ssp.config.schema import ADAPTIVE_LENGTHS, RunConfig, WeightsKind
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.failures import raise_on_all_ranks
from llama_ssp.engine.draft_length import AdaptiveLength, RoundCosts
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.overlap import OverlappedRound
from llama_ssp.engine.round import DraftChoice
from llama_ssp.errors import ConfigError
from llama_ssp.planning.acceptance import expected, pair_of_run
from llama_ssp.planning.overlap import OverlappedTime, better_to_wait
from llama_ssp.reports.folder import COSTS_FILE, OVERLAP_FILE, RunFolder
from llama_ssp.reports.reading import read_json, restore

_NUM_WARM, _NUM_TIMED, _ENOUGH_S = 2, 16, 2.0
_NUM_WARM_PIECES, _NUM_TIMED_PIECES = 3, 8
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


def settle_length(
    decoder: Decoder, config: RunConfig, *, comm: Comm, num_slots: int, folder: RunFolder | None = None
) -> None:
    """Let a decoder choose K for each round, if the run adapts; all ranks must call this together, after `make_room`.

    `comm` has all ranks. A round in the middle of the run reads `num_slots` cache slots. On rank 0, `folder` is the run
    folder that has the costs or will have them. Raises ConfigError on every rank if the folder's costs are damaged, and
    SspError if they cannot be written.
    """
    if not config.speculation.adapts or isinstance(decoder.length, AdaptiveLength):
        return
    choices, kept = _choices(decoder), None
    with raise_on_all_ranks(comm):
        kept = folder.read_kept(COSTS_FILE) if folder else None
        if kept is not None:
            _from_json(kept, choices)
    kept = comm.broadcast_text(kept or "", src=0)
    if not kept:
        kept = comm.broadcast_text(_to_json(_measured(decoder, choices, comm=comm, num_slots=num_slots)), src=0)
        with raise_on_all_ranks(comm):
            if folder:
                folder.write_kept(COSTS_FILE, kept)
    first = ""
    with raise_on_all_ranks(comm):
        first = json.dumps(_expected_acceptance(config))
    # Hosts may have measured other pairs, and all ranks must choose the same K.
    acceptance = json.loads(comm.broadcast_text(first, src=0))
    decoder.length = AdaptiveLength(_from_json(kept, choices), acceptance=acceptance)


def _choices(decoder: Decoder) -> list[DraftChoice]:
    sources = range(len(decoder.round.drafters))
    return [DraftChoice(0), *(DraftChoice(number, source) for source in sources for number in ADAPTIVE_LENGTHS)]


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


def _measured(decoder: Decoder, choices: list[DraftChoice], *, comm: Comm, num_slots: int) -> RoundCosts:
    """Time rounds of every choice in turns, the fastest of each; see `_on_a_line`."""
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
    rounds = {DraftChoice(0): fastest[DraftChoice(0)]}
    for source in sources:
        rounds |= _on_a_line({choice: fastest[choice] for choice in choices[1:] if choice.source == source})
    return RoundCosts(rounds=rounds, catch_up=tuple(catch_up))


def _on_a_line(seconds: dict[DraftChoice, float]) -> dict[DraftChoice, float]:
    """Smooth the times of a drafter's rounds: each drafted token costs a draft step and a row of verification."""
    lengths = [choice.num_tokens for choice in seconds]
    slope, first = linear_regression(lengths, [*seconds.values()])
    least = min(seconds.values()) / 2
    return {choice: max(first + slope * choice.num_tokens, least) for choice in seconds}


def _to_json(costs: RoundCosts) -> str:
    rounds = [
        _RoundCost(num_tokens=choice.num_tokens, source=choice.source, seconds=seconds)
        for choice, seconds in costs.rounds.items()
    ]
    return json.dumps(asdict(_Costs(rounds=rounds, catch_up_seconds=[*costs.catch_up])), indent=1) + "\n"


def _from_json(text: str, choices: list[DraftChoice]) -> RoundCosts:
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


def settle_overlap(
    decoder: Decoder, config: RunConfig, *, comm: Comm, num_slots: int, folder: RunFolder | None = None
) -> None:
    """Choose once for a decoder, if its drafting overlaps verification; all ranks must call this together.

    The choice is how rounds go on after a rejection, by what both models take. For arguments and errors see
    `settle_length`.
    """
    round_ = decoder.round
    if not isinstance(round_, OverlappedRound) or round_.waits is not None:
        return
    kept = None
    with raise_on_all_ranks(comm):
        kept = folder.read_kept(OVERLAP_FILE) if folder else None
        if kept is not None:
            _waits(kept)
    kept = comm.broadcast_text(kept or "", src=0)
    if not kept:
        found = _measured_pieces(decoder, comm=comm, num_slots=num_slots)
        written, pieces = "", OverlappedTime(
            draft_s=found["draft_s"], forward_s=found["forward_s"], exchange_s=found["exchange_s"],
            refill_s=found["refill_s"],
        )  # fmt: skip
        with raise_on_all_ranks(comm):
            waits = better_to_wait(
                pieces, acceptance=_expected_acceptance(config)[0], num_draft_tokens=round_.num_ahead + 1,
                batch_size=decoder.batch_size,
            )  # fmt: skip
            written = json.dumps({"waits": waits} | found, indent=1) + "\n"
        kept = comm.broadcast_text(written, src=0)
        with raise_on_all_ranks(comm):
            if folder:
                folder.write_kept(OVERLAP_FILE, kept)
    round_.waits = _waits(kept)
    _log.info("after a rejection: %s", "waits for a block" if round_.waits else "verifies one token early")


def _measured_pieces(decoder: Decoder, *, comm: Comm, num_slots: int) -> dict[str, float]:
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
    found = {
        name: max(seconds for of_draft, seconds in each if of_draft is is_draft)
        for name, is_draft in (("draft_s", True), ("forward_s", False))
    }
    return found | {"exchange_s": max(round_s - max(found.values()), 0.0), "refill_s": refill_s}


def _waits(text: str) -> bool:
    content: Any = None
    with suppress(ValueError):
        content = read_json(text)
    if not isinstance(content, dict) or not isinstance(content.get("waits"), bool):
        raise ConfigError(f"{OVERLAP_FILE} of run_dir is damaged: delete it to measure again")
    return bool(content["waits"])

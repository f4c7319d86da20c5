"""Measures rounds before a run begins that adapts K or overlaps drafting, and gives the decoder what it found.

All ranks use the times that rank 0 measured. A run folder keeps them for when the run is resumed.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import linear_regression, median
from typing import Any, TypeVar

from llama_ssp.errors import ConfigError
from llama_ssp.planning.acceptance import expected, pair_of_run
from llama_ssp.planning.timing import OverlapForecast, OverlappedTime
from llama_ssp.ranks.comms import Comm
from llama_ssp.reports.folder import COSTS_FILE, OVERLAP_FILE, RunFolder
from llama_ssp.reports.reading import read_json
from llama_ssp.run.sharing import from_rank_0
from llama_ssp.settings.layout import CATCH_UP_CHUNK
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
    round_ = decoder.round
    adapts = config.speculation.adapts and round_.drafters and not isinstance(decoder.length, AdaptiveLength)
    overlaps = isinstance(round_, OverlappedRound) and round_.waits is None
    if not adapts and not overlaps:
        return
    # Hosts may have measured other pairs, and all ranks must choose alike.
    acceptance = from_rank_0(comm, lambda: _expected_acceptance(config))
    if adapts:
        sources = range(len(round_.drafters))
        choices = [DraftChoice(0), *(DraftChoice(number, source) for source in sources for number in ADAPTIVE_LENGTHS)]
        costs = _kept_or_measured(
            folder, COSTS_FILE, comm, read=partial(_read_costs, choices=choices),
            measure=lambda: _measure_costs(decoder, choices, comm=comm, num_slots=num_slots),
        )  # fmt: skip
        decoder.length = AdaptiveLength(costs, acceptance=acceptance)
    if overlaps:
        round_.waits = _kept_or_measured(
            folder, OVERLAP_FILE, comm, read=_read_waits,
            measure=lambda: _choose_waits(decoder, acceptance[0], comm=comm, num_slots=num_slots),
        )  # fmt: skip
        _log.info("after a rejection: %s", "waits for a block" if round_.waits else "verifies one token early")


def _kept_or_measured(
    folder: RunFolder | None, name: str, comm: Comm, *, read: Callable[[Any], _Read], measure: Callable[[], object]
) -> _Read:
    """The measurement in a file of the run folder, the same on every rank; `measure` makes a file that is missing."""

    def kept() -> object:
        text = folder.read_kept(name) if folder else None
        if text is None:
            return None
        try:
            content = read_json(text)
            read(content)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{name} of run_dir is damaged: delete it to measure again") from None
        return content

    def keep() -> object:
        if folder:
            folder.write_kept(name, json.dumps(measured, indent=1) + "\n")
        return measured

    content = from_rank_0(comm, kept)
    if content is None:
        measured = measure()
        content = from_rank_0(comm, keep)
    return read(content)


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


def _measure_costs(decoder: Decoder, choices: list[DraftChoice], *, comm: Comm, num_slots: int) -> dict[str, object]:
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
    rounds = [{"num_tokens": each.num_tokens, "source": each.source, "seconds": s} for each, s in costs.items()]
    return {"rounds": rounds, "catch_up_seconds": catch_up}


def _on_a_line(seconds: dict[DraftChoice, float]) -> dict[DraftChoice, float]:
    """Smooth the times of a drafter's rounds: each drafted token costs a draft step and a row of verification."""
    lengths = [choice.num_tokens for choice in seconds]
    slope, first = linear_regression(lengths, [*seconds.values()])
    least = min(seconds.values()) / 2
    return {choice: max(first + slope * choice.num_tokens, least) for choice in seconds}


def _read_costs(content: Any, choices: list[DraftChoice]) -> RoundCosts:  # noqa: ANN401 - of a file
    rounds = {DraftChoice(cost["num_tokens"], cost["source"]): cost["seconds"] for cost in content["rounds"]}
    catch_up = tuple(content["catch_up_seconds"])
    if [*rounds] != choices or min(rounds.values()) <= 0 or min(catch_up) < 0 or len(catch_up) <= choices[-1].source:
        raise ValueError(content)
    return RoundCosts(rounds=rounds, catch_up=catch_up)


def _choose_waits(decoder: Decoder, acceptance: float, *, comm: Comm, num_slots: int) -> dict[str, object]:
    """Choose how rounds go on after a rejection by what both models take."""
    pieces = measure_pieces(decoder, comm=comm, num_slots=num_slots)
    forecast = OverlapForecast(
        time=pieces, acceptance=acceptance, num_draft_tokens=decoder.round.num_ahead + 1, batch_size=decoder.batch_size
    )
    measured = ("draft_s", "forward_s", "exchange_s", "refill_s")
    return {"waits": forecast.waits} | {name: getattr(pieces, name) for name in measured}


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


def _read_waits(content: Any) -> bool:  # noqa: ANN401 - of a file
    if not isinstance(content["waits"], bool):
        raise TypeError
    return content["waits"]

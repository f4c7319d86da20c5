"""Measures rounds before a run begins that adapts K, and gives the decoder their costs.

All ranks use the times that rank 0 measured. A run folder keeps them for when the run is resumed.
"""

import json
import math
import time
from collections.abc import Sequence
from functools import partial
from statistics import linear_regression

from llama_ssp.architectures.engine import CATCH_UP_CHUNK
from llama_ssp.errors import ConfigError
from llama_ssp.planning.acceptance import Acceptance, expected
from llama_ssp.planning.spec import PlannedPair, pairs_known_by
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.reports.folder import COSTS_FILE, RunFolder
from llama_ssp.reports.reading import read_json
from llama_ssp.settings.drafters import draft_name
from llama_ssp.settings.rules import AT_ZERO
from llama_ssp.settings.schema import RunConfig, adaptive_lengths
from llama_ssp.speculate.engine.adaptive import AdaptiveLength, RoundCosts
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.untyped import Parsed

_NUM_WARM, _NUM_TIMED, _ENOUGH_S = 2, 16, 2.0


def make_ready(
    decoder: Decoder, requests: Sequence[Request], config: RunConfig, *, comm: Comm, folder: RunFolder | None = None
) -> None:
    """Make caches for requests; then measure, once for a decoder, the costs by which it chooses K and rows of rounds.

    All ranks must call this together; most decoders have no such choice. `comm` has all ranks. On rank 0, `folder` is
    the run folder that has the measurement or will have it. Raises ConfigError on every rank if the folder's is
    damaged, and SspError if it cannot be written.
    """
    decoder.make_room(requests)
    round_ = decoder.round

    def in_the_middle() -> int:
        return max(len(request.prompt_ids) + request.max_new_tokens // 2 for request in requests)

    if round_.drafters and round_.steps and decoder.picks_rows and decoder.reading_rows == math.inf:
        decoder.reading_rows = _measure_reading(decoder, comm=comm, num_slots=in_the_middle())
    if not (config.speculation.adapts and round_.drafters) or isinstance(decoder.length, AdaptiveLength):
        return
    # Hosts may have measured other pairs, and all ranks must choose alike.
    acceptance = from_rank_0(comm, lambda: _expected_acceptance(config))
    sources = range(len(round_.drafters))
    lengths = adaptive_lengths(config.draft.model.shape if config.draft.model else None)
    choices = [DraftChoice(0), *(DraftChoice(number, source) for source in sources for number in lengths)]

    def kept() -> object:
        text = folder.read_kept(COSTS_FILE) if folder else None
        if text is None:
            return None
        try:
            content = read_json(text)
            _read_costs(content, choices)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{COSTS_FILE} of run_dir is damaged: delete it to measure again") from None
        return content

    def keep() -> object:
        if folder:
            folder.write_kept(COSTS_FILE, json.dumps(measured, indent=1) + "\n")
        return measured

    content = from_rank_0(comm, kept)
    if content is None:
        measured = _measure_costs(decoder, choices, comm=comm, num_slots=in_the_middle())
        content = from_rank_0(comm, keep)
    decoder.choose_by(AdaptiveLength(_read_costs(content, choices), acceptance=acceptance))


def _measure_reading(decoder: Decoder, *, comm: Comm, num_slots: int) -> float:
    """Measure `Decoder.reading_rows` by plain rounds of one row and of all rows, in turns; the fastest ones count."""
    numbers, plain, found = (1, None), [DraftChoice(0)], list[list[float]]()
    started = time.perf_counter()
    for repetition in range(_NUM_WARM + _NUM_TIMED):
        found.append([decoder.time_rounds(plain, num_slots=num_slots, num_rows=number)[0] for number in numbers])
        is_enough = repetition > _NUM_WARM and time.perf_counter() - started > _ENOUGH_S
        if from_rank_0(comm, partial(bool, is_enough)):
            break
    one_s, all_s = (min(of_number) for of_number in zip(*found[_NUM_WARM:], strict=True))
    row_s = (all_s - one_s) / (decoder.batch_size - 1)
    reading_rows: float = from_rank_0(comm, lambda: max(one_s / row_s - 1, 0.0) if row_s > 0 else math.inf)
    return reading_rows


def _expected_acceptance(config: RunConfig) -> list[float]:
    temperature = config.sampling.temperature
    rule, known_by = config.verification.rule if temperature else AT_ZERO, pairs_known_by(config)

    def figure(draft: str, *, has_model: bool) -> Acceptance:
        return expected(PlannedPair(config.model.name, draft, temperature, rule), known_by, has_model=has_model)

    first = figure(str(draft_name(config.draft)), has_model=config.draft.model is not None).probability
    for known in (config.source.acceptance(config), config.speculation.acceptance):
        first = first if known is None else known
    fallback = config.draft.fallback
    behind = [figure(fallback, has_model=False).probability] if fallback else []
    return [first, *behind]


def _measure_costs(decoder: Decoder, choices: list[DraftChoice], *, comm: Comm, num_slots: int) -> dict[str, object]:
    """Time rounds of every choice in turns, and take the fastest of each; see `_on_a_line`.

    In large batches a drafted token may cost as much as a plain one. Drafts that would lose even if all their tokens
    were accepted are the slowest rounds: they are not timed again, and do not decide what others cost.
    """
    sources = range(len(decoder.round.drafters))
    behind = [DraftChoice(1, source, num_unread=2 + CATCH_UP_CHUNK) for source in sources]
    timed = [*choices, *behind, DraftChoice(0)]  # plain rounds, with which all are compared, count twice
    fastest = dict.fromkeys(timed, math.inf)
    started = time.perf_counter()
    for repetition in range(_NUM_WARM + _NUM_TIMED):
        took = decoder.time_rounds(timed, num_slots=num_slots)
        if repetition >= _NUM_WARM:
            for choice, seconds in zip(timed, took, strict=True):
                fastest[choice] = min(fastest[choice], seconds)
        if repetition > _NUM_WARM:
            is_enough = time.perf_counter() - started > _ENOUGH_S
            left = [] if is_enough else [place for place, choice in enumerate(timed) if _may_gain(choice, fastest)]
            timed = [timed[place] for place in json.loads(comm.broadcast_text(json.dumps(left)))]
            if not timed:
                break
    catch_up = [max(fastest[choice] - fastest[DraftChoice(1, choice.source)], 0.0) for choice in behind]
    costs = {DraftChoice(0): fastest[DraftChoice(0)]}
    for source in sources:
        own = {choice: fastest[choice] for choice in choices[1:] if choice.source == source}
        costs |= _on_a_line(own, fitted=[choice for choice in own if _may_gain(choice, fastest)])
    rounds = [{"num_tokens": k.num_tokens, "source": k.source, "seconds": s} for k, s in costs.items()]
    return {"rounds": rounds, "catch_up_seconds": catch_up}


def _may_gain(choice: DraftChoice, fastest: dict[DraftChoice, float]) -> bool:
    """Whether rounds of a choice could gain over plain ones, if all drafted tokens were accepted."""
    drafted = choice._replace(num_unread=DraftChoice(1).num_unread)
    return not choice.num_tokens or fastest[drafted] < (choice.num_tokens + 1) * fastest[DraftChoice(0)]


def _on_a_line(seconds: dict[DraftChoice, float], *, fitted: list[DraftChoice]) -> dict[DraftChoice, float]:
    """Smooth the times of a drafter's rounds: each drafted token costs a draft step and a position of verification."""
    if len(fitted) < 2:  # noqa: PLR2004 - points of a line
        return seconds
    slope, first = linear_regression([choice.num_tokens for choice in fitted], [seconds[choice] for choice in fitted])
    least = min(seconds.values()) / 2
    return {choice: max(first + slope * choice.num_tokens, least) for choice in seconds}


def _read_costs(content: Parsed, choices: list[DraftChoice]) -> RoundCosts:
    rounds = {DraftChoice(cost["num_tokens"], cost["source"]): cost["seconds"] for cost in content["rounds"]}
    catch_up = tuple(content["catch_up_seconds"])
    if [*rounds] != choices or min(rounds.values()) <= 0 or min(catch_up) < 0 or len(catch_up) <= choices[-1].source:
        raise ValueError(content)
    return RoundCosts(rounds=rounds, catch_up=catch_up)

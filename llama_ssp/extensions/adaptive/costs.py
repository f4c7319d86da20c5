"""Measures rounds before a run that adapts K, and makes the chooser of K from their costs.

All ranks use the times that rank 0 measured. A run folder keeps them for when the run is resumed.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import Any

from llama_ssp.architectures.engine import CATCH_UP_CHUNK
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.adaptive.chooser import AdaptiveLength, RoundCosts
from llama_ssp.extensions.adaptive.records import lengths_for
from llama_ssp.planning.acceptance import Acceptance, expected
from llama_ssp.planning.spec import PlannedPair, pairs_known_by
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.reading import read_json
from llama_ssp.run.tuning import ENOUGH_S, NUM_TIMED, NUM_WARM
from llama_ssp.settings.drafters import draft_name
from llama_ssp.settings.rules import AT_ZERO
from llama_ssp.settings.schema import RunConfig
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.types import Parsed

COSTS_FILE = "round_costs.json"


def make(
    decoder: Decoder, config: RunConfig, *, num_slots: int, comm: Comm, folder: RunFolder | None
) -> AdaptiveLength:
    """Make the chooser of K from the costs in the run folder, or else from measured rounds, which are kept there.

    Raises ConfigError on every rank if the costs in the folder are damaged, and SspError if they cannot be written.
    """
    # Hosts may have measured other pairs, and all ranks must choose alike.
    acceptance = from_rank_0(comm, lambda: expected_acceptance(config))
    sources = range(len(decoder.round.drafters))
    most, known = decoder.round.max_tokens_per_round - 1, config.draft.model
    lengths = sorted({min(number, most) for number in lengths_for(known.shape if known else None)})
    choices = [DraftChoice(0), *(DraftChoice(number, source) for source in sources for number in lengths)]

    def kept() -> object:
        text = folder.read_kept(COSTS_FILE) if folder else None
        if text is None:
            return None
        try:
            content = read_json(text)
            _read_costs(content, choices, decoder.batch_size)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{COSTS_FILE} of run_dir is damaged: delete it to measure again") from None
        return content

    def keep() -> object:
        if folder:
            folder.write_kept(COSTS_FILE, json.dumps(measured, indent=1) + "\n")
        return measured

    content = from_rank_0(comm, kept)
    if content is None:
        how: dict[str, Any] = {"comm": comm, "num_slots": num_slots}
        rounds, catch_up = _measure_costs(decoder, choices, **how)
        measured = {"rounds": rounds, "catch_up_seconds": catch_up}
        if decoder.picks_rows:
            measured["rounds_of_one_row"] = _measure_costs(decoder, choices, num_rows=1, **how)[0]
        content = from_rank_0(comm, keep)
    return AdaptiveLength(_read_costs(content, choices, decoder.batch_size), acceptance=acceptance)


def of_costs(rounds: Mapping[DraftChoice, float], *, acceptance: Sequence[float]) -> AdaptiveLength:
    """Make the chooser of K from known costs of rounds, for drafters that read skipped tokens at no cost."""
    costs = RoundCosts(rounds={**rounds}, catch_up=(0.0,) * len(acceptance))
    return AdaptiveLength(costs, acceptance=acceptance)


def expected_acceptance(config: RunConfig) -> list[float]:
    """The acceptance that is expected of the draft, and of its fallback."""
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


def _measure_costs(
    decoder: Decoder, choices: list[DraftChoice], *, comm: Comm, **how: int
) -> tuple[list[dict[str, float]], list[float]]:
    """Time rounds of every choice in turns, and take the fastest of each; see `_on_a_line` and `Decoder.time_rounds`.

    Returns the costs of rounds, and for each drafter the cost of a chunk to catch up.

    In large batches a drafted token may cost as much as a plain one. Drafts that would lose even if all their tokens
    were accepted are the slowest rounds: they are not timed again, and do not influence the costs of other drafts.
    """
    sources = range(len(decoder.round.drafters))
    behind = [DraftChoice(1, source, num_unread=2 + CATCH_UP_CHUNK) for source in sources]
    timed = [*choices, *behind, DraftChoice(0)]  # plain rounds, with which all are compared, count twice
    fastest = dict.fromkeys(timed, math.inf)
    started = time.perf_counter()
    for repetition in range(NUM_WARM + NUM_TIMED):
        took = decoder.time_rounds(timed, **how)
        if repetition >= NUM_WARM:
            for choice, seconds in zip(timed, took, strict=True):
                fastest[choice] = min(fastest[choice], seconds)
        if repetition > NUM_WARM:
            is_enough = time.perf_counter() - started > ENOUGH_S
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
    return rounds, catch_up


def _may_gain(choice: DraftChoice, fastest: dict[DraftChoice, float]) -> bool:
    """Whether rounds of a choice could gain over plain ones, if all drafted tokens were accepted."""
    drafted = choice._replace(num_unread=DraftChoice(1).num_unread)
    return not choice.num_tokens or fastest[drafted] < (choice.num_tokens + 1) * fastest[DraftChoice(0)]


def _on_a_line(seconds: dict[DraftChoice, float], *, fitted: list[DraftChoice]) -> dict[DraftChoice, float]:
    """Smooth the times of a drafter's rounds: each drafted token costs a draft step and a position of verification."""
    if len(fitted) < 2:
        return seconds
    slope, first = linear_regression([choice.num_tokens for choice in fitted], [seconds[choice] for choice in fitted])
    least = min(seconds.values()) / 2
    return {choice: max(first + slope * choice.num_tokens, least) for choice in seconds}


def _read_costs(content: Parsed, choices: list[DraftChoice], num_rows: int) -> RoundCosts:
    rounds, of_one = (
        {DraftChoice(cost["num_tokens"], cost["source"]): cost["seconds"] for cost in measured}
        for measured in (content["rounds"], content.get("rounds_of_one_row", ()))
    )
    catch_up, costs = tuple(content["catch_up_seconds"]), [*rounds.values(), *of_one.values()]
    is_whole = [*rounds] == choices and [*of_one] in ([], choices) and len(catch_up) > choices[-1].source
    if not is_whole or min(costs) <= 0 or min(catch_up) < 0:
        raise ValueError(content)
    return RoundCosts(rounds=rounds, catch_up=catch_up, of_one=of_one, num_rows=num_rows)

"""The checks of an audit: pure functions of what a server has answered and what the target says of it; without torch.

Rounding in another number format is no fault. The log-probabilities that a server returns tell how far its own law
moves each sum. If instead a total variation t is given, a law within t moves the expectation of a score at a position
by at most t times the score's range. Only what a sum has beyond these bounds is judged.

A processor is judged by a test martingale. With p the requested law and r the one without the processor, a
token has the factor r / ((1 - e) p + e r), whose expectation under p is at most 1, and under a law within t of p at
most 1 + t / e, since it is at most 1 / e. By Ville's inequality its product over all tokens exceeds 1 / alpha with
probability alpha at most. The same with p and r exchanged shows that a processor is there.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.evaluate import statistics
from llama_ssp.extensions.evaluate.audit.records import GREEDY, LOG_PROBS, SEEDS, STOPS, SWAPPED, TOKENS
from llama_ssp.extensions.evaluate.audit.texts import Answered, Scored
from llama_ssp.extensions.evaluate.martingales import SCORES, Sum, moves, powers
from llama_ssp.extensions.evaluate.suites.distribution import FALSE_ALARM_RATE, LEAST_POWER, NUM_SWAPS, PLACES
from llama_ssp.text.log_probs import TokenLogprob

HELD, FAILED, UNKNOWN, NOTED = "held", "failed", "could not judge", "noted"
OF_LAW, OF_END = FALSE_ALARM_RATE / 2 / len(SCORES), FALSE_ALARM_RATE / 4 / len(SCORES)
OF_FIRST = FALSE_ALARM_RATE / 32 / len(SCORES)
OF_SWAPS, OF_PROCESSORS, OF_TOKENS, OF_SEEDS = (FALSE_ALARM_RATE / share for share in (16, 8, 64, 64))
"""Shares of the rate of false alarms: the swap test's, and those of all processors, tokens and pairs of seeds."""
MOST_ROUNDING = 0.1
"""Total variation that no number format explains."""
_OTHER_MODEL = 1.0
"""Nats per token by which texts are less probable than the target's own if another model wrote them."""
_OF_OTHER, _OF_OTHER_ROUNDED, _SAME, _MOST_EXPONENT = 0.02, 0.5, 1e-4, 500.0
"""e, and its value where laws differ by rounding; total variation in the same number format; the largest exponent."""
_COOLER, _MOST_FAR = 0.1, 0.01
"""The fault of a temperature times 0.9, and the share of places where rounding may exceed MOST_ROUNDING."""
_MOST_SLOPE, _LEAST_ALIKE, _NUM_ERRORS, _LEAST_PLACES = 0.02, 0.95, 5.0, 50
_FACTORS, _MOST_SPREAD = (0.0, 0.5, 2.0), 2.0
"""Factors f by which a token may come more or less often than expected, and the most that rounding explains."""
_STEPS = 40
_END = -1


class Finding(NamedTuple):
    """The finding of a check: its name, `HELD` or another outcome, and a sentence without a full stop."""

    check: str
    outcome: str
    said: str


def judge_sums(check: str, sums: Mapping[str, Sum], rounding: Mapping[str, float] | None, *, least_p: float) -> Finding:
    """Judge sums of texts, and name the faults that they would have found.

    `rounding` says how far rounding may have moved each sum; None if that is not known.
    """
    varying = {name: one for name, one in sums.items() if one.varies}
    if not varying:
        return Finding(check, UNKNOWN, "no text was long enough")

    left = _beyond(varying, rounding or {})
    p_value, name = min((one.p_value, name) for name, one in left.items())
    z = left[name].z
    said = f'of {len(varying)} sums the farthest from 0 is "{name}", by {z:+.1f} standard errors'
    said += f" (p = {p_value:.2g}, and a sum fails at {least_p:.2g})"
    if p_value > least_p:
        return Finding(check, HELD, said + _missed(varying, rounding or {}, least_p=least_p))
    low, high = 0.0, 1.0  # of the total variation that would explain the sums
    for _ in range(_STEPS):
        middle = (low + high) / 2
        worst = min(one.beyond(middle * one.range).p_value for one in varying.values())
        low, high = (middle, high) if worst <= least_p else (low, middle)
    said += f"; a law at a total variation of {high:.3g} could give them"
    if rounding is not None or high > MOST_ROUNDING:
        return Finding(check, FAILED, said)
    return Finding(check, UNKNOWN, f"{said}, below which nothing can be said: give baseline= or task.tolerance=")


def tolerated(sums: Mapping[str, Sum], variation: float) -> dict[str, float]:
    """Return the most by which a law at this total variation may move each sum."""
    return {name: variation * one.range for name, one in sums.items()}


def _beyond(sums: Mapping[str, Sum], rounding: Mapping[str, float]) -> dict[str, Sum]:
    return {name: one.beyond(rounding.get(name, 0.0)) for name, one in sums.items()}


def _missed(sums: Mapping[str, Sum], rounding: Mapping[str, float], *, least_p: float) -> str:
    """Name the faults that these sums would have shown, and the ones that they could have missed."""
    found = powers([*_beyond(sums, rounding).values()], least_p=least_p)
    chances = {fault: found.get(fault, 0.0) for fault in moves(sums.values())}
    surprise = sums.get("surprise")
    if surprise:  # of an exponential family: the derivative of its mean is its variance
        moved = replace(surprise, shifts=(_COOLER / (1 - _COOLER) * surprise.variance,))
        moved = moved.beyond(rounding.get("surprise", 0.0))
        chances[f"temperature x {1 - _COOLER:g}"] = moved.power(0, least_p=least_p)
    missed = [f"{fault} ({chance:.2f})" for fault, chance in chances.items() if chance < LEAST_POWER]
    sure = [fault for fault, chance in chances.items() if chance >= LEAST_POWER]
    if not sure:
        return "; at this size and tolerance no fault would surely have been found"
    return f"; would have found: {', '.join(sure)}" + (f"; could have missed: {', '.join(missed)}" if missed else "")


def between(first: Mapping[str, Sum], second: Mapping[str, Sum], *, factor: float) -> dict[str, Sum]:
    """Return the sums of texts minus those of a baseline with the same rounding; `factor` makes up for its size."""
    return {
        name: replace(
            one,
            value=one.value - factor * other.value,
            variance=one.variance + factor**2 * other.variance,
            reach=max(one.reach, factor * other.reach),
        )
        for name, one in first.items()
        for other in [second[name]]
    }


def require_target(log_probs: Sequence[float], expected: float) -> None:
    """Raise ConfigError if log-probabilities sum to far less than `expected`: the texts are not the target's."""
    apart = (expected - sum(log_probs)) / max(len(log_probs), 1)
    if apart > _OTHER_MODEL:
        raise ConfigError(
            f"the server's texts are of another model or other settings: each token is {apart:.1f} nats more "
            "improbable under the target than its own would be; give the server's model"
        )


def judge_processor(
    name: str, asked: Sequence[float], faulty: Mapping[str, Sequence[float]], *, num: int, variation: float | None
) -> Finding:
    """Judge a processor by log-probabilities of tokens, under the law that was asked for and under faulty ones.

    Faulty laws have names, and in the first the processor is ignored. `num` is the number of processors and other
    faults that are judged. `variation` is the total variation by rounding, None if that is not known.
    """
    most = MOST_ROUNDING if variation is None else variation
    share = _OF_OTHER if most < _SAME else _OF_OTHER_ROUNDED

    def product(of: Sequence[float], against: Sequence[float]) -> float:
        return sum(
            -math.log((1 - share) * math.exp(min(other - own, _MOST_EXPONENT)) + share)
            for own, other in zip(of, against, strict=True)
        )

    needed = math.log(num / OF_PROCESSORS) + len(asked) * math.log1p(most / share)
    found = {fault: (product(law, asked), product(asked, law)) for fault, law in faulty.items()}
    fault = max(found, key=lambda one: found[one][0])
    fault = fault if found[fault][0] >= needed else next(iter(found))
    of_fault, of_asked = found[fault]
    factors = f"over {len(asked)} tokens the evidence for it is exp({of_asked:.0f}), against it exp({of_fault:.0f})"
    if of_fault >= needed:
        return Finding(name, FAILED, f"{name} is {fault}: {factors}")
    if of_asked >= needed:
        missed = [fault for fault, (_, against) in found.items() if against < needed]
        return Finding(name, HELD, factors + (f"; could have missed: {name} {', '.join(missed)}" if missed else ""))
    said = f"{factors}: too few tokens, or another {name} than was asked for"
    said += ", or rounding, which log-probabilities or task.tolerance= would tell" if variation is None else ""
    return Finding(name, UNKNOWN, said)


def judge_tokens(
    came: Mapping[int, int], expected: Mapping[int, float], *, vocab_size: int, variation: float | None
) -> Finding:
    """Judge how often each token came at all positions, by products of f^(it came) exp((1 - f) p) for some f.

    With p the token's probability at each position, the expectation of a product is at most 1 too. f = 0 shows a token
    that never comes. `variation` is the total variation by rounding, None if that is not known.
    """
    spread = 1.0 if variation is not None and variation < _SAME else _MOST_SPREAD
    needed = math.log(len(_FACTORS) * vocab_size / OF_TOKENS)

    def evidence(token: int, factor: float) -> float:
        num, mean = came.get(token, 0), expected[token] * (spread if factor > 1 else 1 / spread)
        return (1 - factor) * mean + (num * math.log(factor) if factor else -math.inf if num else 0.0)

    most, token = max(((evidence(token, factor), token) for token in expected for factor in _FACTORS), default=(0.0, 0))
    if most >= needed:
        said = f"token {token} came {came.get(token, 0)} times for {expected[token]:.1f} expected: exp({most:.0f})"
        return Finding(TOKENS, FAILED, f"{said} is the evidence against the law, and exp({needed:.0f}) decides")
    least = needed * spread
    said = f"a token that never comes, if it was expected {least:.0f} times"
    said += f" ({sum(one >= least for one in expected.values())} of {vocab_size} were)"
    return Finding(TOKENS, HELD, f"would have found: {said}; could have missed: one that was expected less often")


def judge_log_probs(pairs: Sequence[tuple[Scored, TokenLogprob]]) -> tuple[Finding, float | None]:
    """Judge returned log-probabilities against the target's own; returns the largest total variation as well.

    The variation is computed over the most probable tokens that both sides name and the rest as one, and is at least
    what the text's token alone shows. Rounding leaves the slope of a regression of one side on the other at 1; another
    temperature does not. Raises ConfigError if the two hardly correlate: the server has another model.
    """
    distances, slopes = list[float](), list[tuple[float, float, float]]()
    own_apart = [abs(scored.own - known.logprob) for scored, known in pairs]
    for scored, known in pairs:
        own = {one.token: one.logprob for one in known.top}
        both = [(scored.top[token], value) for token, value in own.items() if token in scored.top]
        of_server = [math.exp(one) for one, _ in both]
        of_target = [math.exp(one) for _, one in both]
        rest = abs(sum(of_server) - sum(of_target))
        of_top = (sum(abs(a - b) for a, b in zip(of_server, of_target, strict=True)) + rest) / 2
        distances.append(max(of_top, abs(math.exp(scored.own) - math.exp(known.logprob))))
        total = sum(of_target)
        means = [sum(p * pair[one] for p, pair in zip(of_target, both, strict=True)) / (total or 1) for one in (0, 1)]
        slopes.append(
            (
                sum(p * (a - means[0]) * (b - means[1]) for p, (a, b) in zip(of_target, both, strict=True)),
                sum(p * (b - means[1]) ** 2 for p, (_, b) in zip(of_target, both, strict=True)),
                sum(p * (a - means[0]) ** 2 for p, (a, _) in zip(of_target, both, strict=True)),
            )
        )
    if len(pairs) < _LEAST_PLACES:
        return Finding(LOG_PROBS, UNKNOWN, "the server returns none, or too few"), None
    shared, variance, of_theirs = (sum(of_all) for of_all in zip(*slopes, strict=True))
    if variance and shared < _LEAST_ALIKE * math.sqrt(variance * of_theirs):
        raise ConfigError(
            f"the server's log-probabilities are another model's: over {len(pairs)} places their correlation with the "
            f"target's is {shared / math.sqrt(variance * of_theirs):.2f}; give the server's model, with its weights"
        )
    slope = shared / (variance or 1.0)
    error = math.hypot(*(theirs - slope * ours for theirs, ours, _ in slopes)) / (variance or 1.0)
    largest = max(distances)
    said = f"over {len(pairs)} places the largest total variation is {largest:.2g}, and the slope {slope:.4f}"
    said += f"; those of the texts' tokens differ by {median(own_apart):.2g} nats (median)"
    if abs(slope - 1) > max(_MOST_SLOPE, _NUM_ERRORS * error):
        return Finding(
            LOG_PROBS, FAILED, f"{said}: they are those of temperature {1 / slope if slope else 0:.2f}"
        ), None
    far = sum(one > MOST_ROUNDING for one in distances)
    if far > _MOST_FAR * len(pairs) or median(own_apart) > MOST_ROUNDING:
        said += f", and {far} places are above {MOST_ROUNDING}"
        return Finding(LOG_PROBS, FAILED, f"{said}: they are not the target's"), None
    return Finding(LOG_PROBS, HELD, said), largest


def judge_greedy(gaps: Sequence[Sequence[float]], *, near_tie: float, is_known: bool) -> Finding:
    """Judge greedy texts by how far each token is below the best one, in nats."""
    if not gaps:
        return Finding(GREEDY, UNKNOWN, "the server gives no greedy text")
    worst = [max(of_text, default=0.0) for of_text in gaps]
    others = [one for one in worst if one > near_tie]
    said = f"{sum(one == 0 for one in worst)} of {len(worst)} texts are the target's best tokens"
    if others:
        said += f", {len(others)} part by up to {max(others):.3g} nats, where a near tie is at most {near_tie:.3g}"
    elif any(worst):
        said += f", the others part at near ties, of at most {near_tie:.3g} nats"
    return Finding(GREEDY, HELD if not others else FAILED if is_known else UNKNOWN, said)


def judge_stops(texts: Sequence[tuple[str, Answered, Answered]], decode: Callable[[Sequence[int]], str]) -> Finding:
    """Judge texts that were to stop at a string, by the texts of the same seeds without a stop.

    Rounding may let a text go another way, by chance to an earlier stop: more than half have to end elsewhere.
    """
    wrong = [stop for stop, answer, _ in texts if stop in answer.text]
    ended = [one for one in texts if one[1].finish == "stop"]
    if wrong:
        return Finding(STOPS, FAILED, f"{len(wrong)} of {len(texts)} texts go on after a stop, such as {wrong[0]!r}")
    off = sum(_ends_elsewhere(*one, decode) for one in ended)
    if 2 * off > len(ended):
        return Finding(STOPS, FAILED, f"{off} of {len(texts)} texts end before their stop, or after one token more")
    said = f"{len(ended)} of {len(texts)} texts end at their stop, and none goes on"
    return Finding(STOPS, HELD if ended else UNKNOWN, said)


def _ends_elsewhere(stop: str, answer: Answered, whole: Answered, decode: Callable[[Sequence[int]], str]) -> bool:
    text, ids = whole.text.partition(stop)[0], answer.ids or ()
    if answer.text != text:
        return text.startswith(answer.text) or answer.text.startswith(text)
    return ids == (whole.ids or ())[: len(ids)] and stop in decode(ids[:-1])


def judge_seeds(pairs: Sequence[tuple[Answered, Answered]], texts: Sequence[tuple[Hashable, float]]) -> Finding:
    """Compare texts of one seed, under load and alone; rounding that depends on the batch may change them.

    `texts` come from different seeds: each has a value to compare, equal only for equal prompts, and a log-probability.
    With probability at most alpha, two of them are equal at a log-probability below log(alpha / pairs); rounding may
    double this.
    """
    same = sum(first.ids == second.ids and first.text == second.text for first, second in pairs)
    said = f"{same} of {len(pairs)} texts of a seed are the same alone as among others"
    least = 2 * math.log(OF_SEEDS / max(math.comb(len(texts), 2), 1))
    num, rare = Counter(text for text, _ in texts), [text for text, log_prob in texts if log_prob < least]
    if twice := sum(num[text] > 1 for text in rare):
        return Finding(SEEDS, FAILED, f"{said}; {twice} texts are those of other seeds too")
    if missed := len(texts) - len(rare):
        said += f"; could have missed: one text for two seeds, among {missed} of {len(texts)} texts"
    return Finding(SEEDS, HELD if same == len(pairs) > 0 else NOTED, said)


def judge_swaps(prompts: Sequence[Sequence[tuple[Answered, Answered]]]) -> Finding:
    """Compare the next tokens of a server and of its baseline, at a few places, without weights."""

    def token(answer: Answered, place: int) -> object:
        ids: Sequence[object] = answer.text if answer.ids is None else answer.ids
        return ids[place] if place < len(ids) else _END

    groups = [
        statistics.PairedGroup(
            columns=[[(token(one, place), token(other, place)) for one, other in pairs] for place in PLACES],
            differences=[0.0] * len(pairs),
        )
        for pairs in prompts
        if pairs
    ]
    if not groups:
        return Finding(SWAPPED, UNKNOWN, "the baseline gives no text")
    signs = statistics.swaps(groups, num_swaps=NUM_SWAPS * 2, seed=0)
    p_value = statistics.p_value(statistics.count_statistic(groups, signs))
    said = f"next tokens of the server and of its baseline: p = {p_value:.2g}"
    return Finding(SWAPPED, HELD if p_value > OF_SWAPS else FAILED, said)


class SeenContext(NamedTuple):
    """A context and a token after it, with how often the token came and how often it should have come."""

    before: tuple[int, ...]
    token: int
    num_came: int
    num_expected: float
    num_texts: int


def worst_contexts(
    texts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], *, num: int = 3, least: int = 20
) -> list[SeenContext]:
    """Find the contexts that came at least `least` times and whose next tokens differ most from what is expected.

    `texts` has prompts, new tokens and their log-probabilities.
    """
    came, known = Counter[tuple[tuple[int, ...], int]](), dict[tuple[tuple[int, ...], int], float]()
    totals = Counter[tuple[int, ...]]()
    for prompt, ids, log_probs in texts:
        for place in range(min(len(ids), max(PLACES))):
            before = (*prompt, *ids[:place])
            totals[before] += 1
            came[before, ids[place]] += 1
            known[before, ids[place]] = math.exp(log_probs[place])

    def apart(entry: tuple[tuple[int, ...], int]) -> float:
        p, total = known[entry], totals[entry[0]]
        return abs(came[entry] - total * p) / math.sqrt(max(total * p * (1 - p), 1.0))

    kept = sorted((entry for entry in came if totals[entry[0]] >= least), key=apart, reverse=True)[:num]
    return [
        SeenContext(before, token, came[before, token], totals[before] * known[before, token], totals[before])
        for before, token in kept
    ]

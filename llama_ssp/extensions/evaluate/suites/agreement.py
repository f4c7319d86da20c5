"""`suite=agreement`: greedy text of plain and of speculative decoding, equal up to near ties.

Where two texts part, both tokens should be as good: verification computes several positions at once and may round
differently from plain decoding, so two nearly equal logits can change their order. The suite passes if every text is
equal or parts at such a near tie; of a reproducible run, whose logits have the same bits, only if every text is equal.
It draws nothing, so its only false alarms are differences by rounding that exceed the bound of a near tie.
"""

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.evaluate.records import Evidence, Suite, task_and_suite
from llama_ssp.extensions.evaluate.statistics import wilson
from llama_ssp.reports.records import CompletionLine, Evaluation, Measure
from llama_ssp.reports.summary import CompletionPair, counted_rounds
from llama_ssp.settings.schema import RunConfig

NEAR_TIES = {Dtype.fp32: 1e-3, Dtype.fp16: 0.1, Dtype.bf16: 0.5}
"""Largest difference of two log-probabilities that rounding can turn, by number format, in nats."""


def place_of_difference(pair: CompletionPair) -> int | None:
    """The first place where the new tokens differ; None if they are equal."""
    both = enumerate(zip_longest(pair.plain.token_ids, pair.speculative.token_ids))
    return next((place for place, (plain, fast) in both if plain != fast), None)


def scored(pairs: Iterable[CompletionPair]) -> list[CompletionLine]:
    """Both lines of each pair that differs."""
    return [line for pair in pairs if place_of_difference(pair) is not None for line in pair]


def judge(evidence: Evidence) -> Evaluation:
    """Count equal texts, near ties and others."""
    near_tie = task_and_suite(evidence.config)[0].near_tie
    if near_tie is None:
        near_tie = NEAR_TIES.get(evidence.config.model.dtype, 0.0)
        near_tie = -1.0 if evidence.is_reproducible else near_tie
    gaps = [_gap(evidence, pair) for pair in evidence.pairs if place_of_difference(pair) is not None]
    num_pairs, others = len(evidence.pairs), [gap for gap in gaps if gap > near_tie]
    reason = (
        f"{num_pairs - len(gaps)} of {num_pairs} greedy texts are equal, {len(gaps) - len(others)} part at a near tie"
    )
    if others:
        finite = [gap for gap in others if gap != float("inf")]
        allowed = f"where a near tie is at most {near_tie:g}" if near_tie >= 0 else "and this run is reproducible"
        apart = f", by {max(finite):.3g} nats {allowed}" if finite else ""
        reason += f", and {len(others)} {'parts' if len(others) == 1 else 'part'} elsewhere{apart}"
    ties = [gap for gap in gaps if gap <= near_tie]
    counts = {"equal texts": num_pairs - len(gaps), "part at a near tie": len(ties), "part elsewhere": len(others)}
    measures = [Measure(name=name, value=number) for name, number in counts.items()]
    measures += [Measure(name="widest near tie, nats", value=max(ties))] if ties else []
    return Evaluation(suite=SUITE.name, passed=not others, reason=reason, measures=[*measures, *_drafted(evidence)])


def _gap(evidence: Evidence, pair: CompletionPair) -> float:
    """Return how far apart the log-probabilities of both tokens are where the texts part; infinite if one text ends."""
    place = place_of_difference(pair)
    both = [evidence.log_probs[line.key] for line in pair]
    if place is None or any(place >= len(log_probs) for log_probs in both):
        return float("inf")
    return abs(both[0][place] - both[1][place])


def _drafted(evidence: Evidence) -> list[Measure]:
    """Measure how often the draft's best token is the target's, over the tokens that verification examined."""
    rounds = counted_rounds([pair.speculative for pair in evidence.pairs])
    if not rounds:
        return []
    accepted, examined = map(sum, zip(*rounds, strict=True))
    name = "drafted tokens that are the target's best"
    return [Measure.within(name, accepted / examined, wilson(accepted, examined))]


def _problems(config: RunConfig) -> Iterator[str]:
    if config.sampling.temperature > 0:
        yield (
            f"suite=agreement compares greedy text, and sampling.temperature is {config.sampling.temperature:g}: leave "
            "sampling settings out, use sampling=greedy, or compare samples with suite=distribution"
        )


SUITE = Suite(
    name="agreement",
    judge=judge,
    scored=scored,
    defaults={"sampling.temperature": 0.0},
    settings=("near_tie", "default_prompts"),
    why_one_sample="whose texts are greedy",
    problems=_problems,
)

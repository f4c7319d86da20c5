"""`suite=distribution`: do plain and speculative samples of a run come from one distribution?

Each prompt is sampled many times in both modes, with different seeds. Two tests swap the samples of pairs: one compares
how often each token occurs at a few fixed positions, the other the log-likelihoods of samples under the target. The
remaining tests compare the speculative samples with the target's own probabilities, by the sum over all tokens of each
score of `martingales`. Each of the two kinds gets half of the rate of false alarms, divided equally among its tests.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from llama_ssp.extensions.evaluate import statistics
from llama_ssp.extensions.evaluate.martingales import SCORES, moves, powers, sums_of
from llama_ssp.extensions.evaluate.records import Evidence, Suite
from llama_ssp.reports.records import CompletionLine, Evaluation, Measure
from llama_ssp.reports.summary import CompletionPair
from llama_ssp.settings.schema import RunConfig

FALSE_ALARM_RATE = 1e-3
"""Highest probability of a failure if both modes have one distribution."""
LEAST_POWER = 0.99
"""A verdict names the faults that it finds with a smaller probability."""
PLACES = (0, 1, 2, 4, 8)
"""Positions of new tokens at which tokens are counted; 0 is the first after the prompt."""
MOST_APART = 1e-5
"""The most total variation between processors and transformers' warpers, which round differently in fp32."""
NUM_SWAPS = 9999
LEAST_SAMPLES = 20
_ENDED = -1
_SEED = 0


def scored(pairs: Iterable[CompletionPair]) -> list[CompletionLine]:
    """Return the completions to score: for each prompt all plain ones, then all speculative ones.

    The two kinds stay apart, since only the speculative ones are scored by the draft as well.
    """
    of_prompts = groupby(pairs, key=lambda pair: pair.plain.index)
    return [line for _, of_prompt in of_prompts for lines in zip(*of_prompt, strict=True) for line in lines]


def _groups_of(evidence: Evidence) -> list[statistics.PairedGroup]:
    groups = []
    for _, of_prompt in groupby(evidence.pairs, key=lambda pair: pair.plain.index):
        pairs = list(of_prompt)
        places = [place for place in PLACES if any(len(line.token_ids) > place for pair in pairs for line in pair)]
        columns = [[(_token(pair.plain, place), _token(pair.speculative, place)) for pair in pairs] for place in places]
        sums = [[sum(evidence.log_probs[line.key]) for line in pair] for pair in pairs]
        groups.append(statistics.PairedGroup(columns=columns, differences=[fast - plain for plain, fast in sums]))
    return groups


def _token(line: CompletionLine, place: int) -> int:
    return line.token_ids[place] if place < len(line.token_ids) else _ENDED


def judge(evidence: Evidence) -> Evaluation:
    """Test whether both modes have one distribution, and the speculative samples the target's."""
    groups = _groups_of(evidence)
    sums = {name: of_score for name, of_score in sums_of(evidence.sums).items() if of_score.varies}
    signs = statistics.swaps(groups, num_swaps=NUM_SWAPS, seed=_SEED)
    tests = {"next tokens": statistics.count_statistic, "log-likelihoods": statistics.mean_statistic}
    p_values = {name: statistics.p_value(statistic(groups, signs)) for name, statistic in tests.items()}
    of_sum = FALSE_ALARM_RATE / (2 * len(SCORES))
    least = dict.fromkeys(p_values, FALSE_ALARM_RATE / (2 * len(p_values))) | dict.fromkeys(sums, of_sum)
    p_values |= {name: of_score.p_value for name, of_score in sums.items()}
    worst = min(p_values, key=lambda name: p_values[name] / least[name])
    is_apart = evidence.apart > MOST_APART
    passed = p_values[worst] > least[worst] and not is_apart
    power, moved = powers(sums.values(), least_p=of_sum), moves(sums.values())
    verdict = "can come from one distribution" if passed else "come from different distributions"
    missed = [f"{fault} ({chance:.2f})" for fault, chance in power.items() if chance < LEAST_POWER]
    apart = statistics.total_variation(groups, seed=_SEED)
    difference = statistics.mean_interval([group.differences for group in groups])
    return Evaluation(
        suite=SUITE.name,
        passed=passed,
        unseen=[*missed, *evidence.out_of_reach],
        reason=f"processors and transformers' warpers are {evidence.apart:.2g} apart, above {MOST_APART}"
        if is_apart
        else (
            f"plain and speculative samples {verdict}: of {len(p_values)} p-values the worst is {p_values[worst]:.2g} "
            f"for {worst}, {'above' if passed else 'not above'} {least[worst]:.2g} ({len(evidence.pairs)} pairs)"
        ),
        measures=[
            *(Measure(name=f"p-value, {name}", value=p_values[name]) for name in tests),
            *(Measure(name=f"standard errors, {name}", value=of_score.z) for name, of_score in sums.items()),
            *(Measure(name=f"standard errors if there were {fault}", value=z) for fault, z in moved.items()),
            *(Measure(name=f"probability of finding {fault}", value=chance) for fault, chance in power.items()),
            Measure(name="total variation of processors and transformers' warpers", value=evidence.apart),
            Measure.within("log-likelihood in nats, speculative minus plain", sum(difference) / 2, difference),
            Measure.within("total variation of next tokens", apart.value, apart.interval),
            Measure(name="total variation that chance alone gives", value=apart.noise),
        ],
    )


def _problems(config: RunConfig) -> Iterator[str]:
    if config.sampling.temperature == 0:
        yield (
            "suite=distribution compares samples, and at temperature 0 all samples of a prompt are equal: use "
            "suite=agreement, or a temperature above 0"
        )
    elif config.num_samples < LEAST_SAMPLES:
        yield f"num_samples={config.num_samples} is too few for suite=distribution: give at least {LEAST_SAMPLES}"


SUITE = Suite(
    name="distribution",
    judge=judge,
    scored=scored,
    needs_sums=True,
    defaults={"max_new_tokens": 48, "num_samples": 500},
    settings=("default_prompts",),
    problems=_problems,
)

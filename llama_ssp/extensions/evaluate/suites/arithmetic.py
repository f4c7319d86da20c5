"""`suite=arithmetic`: products of two numbers of two digits, after three worked examples.

Both modes complete the same prompts. The rates of right answers come with Wilson's intervals. The suite passes if two
one-sided tests show that the rates differ by less than `task.margin`, and a product was right.
"""

import random
import re
from collections.abc import Iterator

from llama_ssp.extensions.evaluate.records import Evidence, Suite, task_and_suite
from llama_ssp.extensions.evaluate.statistics import rate_difference, wilson
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine, Evaluation, Measure
from llama_ssp.settings.schema import RunConfig

MOST_PROMPTS = 90 * 90
"""All products of two numbers of two digits."""
NUM_PROMPTS = 1000
"""Products of a run that does not say num_prompts."""
NUM_EXAMPLES = 3
FALSE_PASS_RATE = 0.05
"""Highest probability of a pass if the true rates differ by the margin or more."""
_QUESTION = re.compile(r"(\d+) \* (\d+) =$")
_ANSWER = re.compile(r"\s*(\d+)\b")


def prompts(config: RunConfig) -> list[str]:
    """Make prompts that depend on the seed alone: a larger number of prompts begins with those of a smaller one."""
    products = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(config.seed).shuffle(products)
    made = []
    for number in range(config.num_prompts or NUM_PROMPTS):
        question, *examples = [products[(number + place) % len(products)] for place in range(NUM_EXAMPLES + 1)]
        lines = [f"{first} * {second} = {first * second}" for first, second in examples]
        made.append("\n".join([*lines, f"{question[0]} * {question[1]} ="]))
    return made


def problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the number of products."""
    if (config.num_prompts or 0) > MOST_PROMPTS:
        yield f"num_prompts={config.num_prompts} is more than the {MOST_PROMPTS} products of two numbers of two digits"


def is_right(line: CompletionLine) -> bool:
    """Whether the text begins with the whole product."""
    question, answer = _QUESTION.search(line.prompt), _ANSWER.match(line.text)
    return bool(question and answer) and int(answer[1]) == int(question[1]) * int(question[2])  # type: ignore[index]


def judge(evidence: Evidence) -> Evaluation:
    """Compare the rates of right answers."""
    margin = task_and_suite(evidence.config)[0].margin
    right = [(is_right(pair.plain), is_right(pair.speculative)) for pair in evidence.pairs]
    num_pairs, num_plain, num_fast = len(right), sum(plain for plain, _ in right), sum(fast for _, fast in right)
    alone = right.count((True, False)), right.count((False, True))
    confidence = 1 - 2 * FALSE_PASS_RATE
    tested = rate_difference(*alone, num_pairs, confidence=confidence)
    is_equivalent = -margin < tested.low and tested.high < margin
    shown = f"the rates of right answers, plain {num_plain / num_pairs:.1%} and speculative "
    shown += f"{num_fast / num_pairs:.1%} of {num_pairs}, "
    verdict = f"are shown to differ by less than {margin:g}"
    if not is_equivalent:
        is_different = tested.low > 0 or tested.high < 0
        more = "" if is_different else ": more prompts, as num_prompts=, narrow the interval"
        interval = f"{tested.low:.3f} to {tested.high:.3f} ({confidence:.0%})"
        verdict = f"differ by {interval}, not within the margin of {margin:g}{more}"
    shows = bool(num_plain or num_fast)
    if not shows:
        verdict = "are both 0, which shows nothing: use a model that can multiply"
    difference = (alone[1] - alone[0]) / num_pairs
    measures = [
        Measure.within(f"right answers, {PLAIN}", num_plain / num_pairs, wilson(num_plain, num_pairs)),
        Measure.within(f"right answers, {SPECULATIVE}", num_fast / num_pairs, wilson(num_fast, num_pairs)),
        Measure.within("difference, speculative minus plain", difference, rate_difference(*alone, num_pairs)),
    ]
    return Evaluation(suite=SUITE.name, passed=is_equivalent and shows, reason=shown + verdict, measures=measures)


SUITE = Suite(
    name="arithmetic",
    judge=judge,
    prompts=prompts,
    problems=problems,
    # A space, four digits and the end of the line, each at most a token, and some room.
    defaults={"max_new_tokens": 8, "stop_strings": ["\n"]},
    settings=("margin",),
    why_one_sample="which counts every prompt once: give more prompts with num_prompts=",
)

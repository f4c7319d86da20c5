"""Each suite asks its prompts, and judges known completions."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.extensions.evaluate.martingales import FAULTS, SCORES, Role, TextSums, roles_of, sums_of
from llama_ssp.extensions.evaluate.records import EvaluateConfig, Evidence
from llama_ssp.extensions.evaluate.suites import agreement, arithmetic, distribution
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine, Measure
from llama_ssp.reports.summary import CompletionPair, pairs_of
from llama_ssp.settings.schema import RunConfig, VerificationConfig
from tests.helpers import runs


def line(
    mode: str, token_ids: Sequence[int], *, index: int = 0, sample: int = 0, prompt: str = "p", text: str = "t"
) -> CompletionLine:
    """One completion."""
    fast = {"num_rounds": 1, "accepted_lengths": [1], "examined_lengths": [2]} if mode == SPECULATIVE else {}
    own = {"token_ids": list(token_ids), "num_new_tokens": len(token_ids), "prompt": prompt, "text": text}
    return replace(runs.PLAIN, index=index, sample=sample, mode=mode, **own, **fast)  # type: ignore[arg-type]


def both(
    plain: Sequence[int], fast: Sequence[int], *, index: int = 0, sample: int = 0
) -> tuple[CompletionLine, CompletionLine]:
    """A pair of completions with these tokens."""
    return line(PLAIN, plain, index=index, sample=sample), line(SPECULATIVE, fast, index=index, sample=sample)


def config(suite: str, *, seed: int = 0, **task: Any) -> RunConfig:
    parts: dict[str, Any] = dict.fromkeys(("draft", "placement", "sampling")) | {"verification": VerificationConfig()}
    model = ModelConfig(name="m", dtype=Dtype.fp32)
    return RunConfig(task=EvaluateConfig(suite=suite, **task), model=model, seed=seed, **parts)


def evidence(
    settings: RunConfig, pairs: list[CompletionPair], log_probs: dict[Any, list[float]] | None = None
) -> Evidence:
    return Evidence(config=settings, pairs=pairs, log_probs=log_probs or {})


def holds(measure: Measure, value: float) -> bool:
    """Whether the interval of a measure holds a value."""
    return measure.low is not None and measure.high is not None and measure.low <= value <= measure.high


def test_pairs_do_not_depend_on_the_order_of_the_records() -> None:
    lines = [each for index in range(3) for sample in range(2) for each in both([1], [2], index=index, sample=sample)]
    wanted = pairs_of(lines)
    random.Random(0).shuffle(lines)
    assert pairs_of(lines) == wanted
    assert [(pair.plain.index, pair.plain.sample) for pair in wanted] == [(i, s) for i in range(3) for s in range(2)]
    assert len(pairs_of(lines[:-1])) == 5


def test_products_have_three_worked_examples_no_product_is_asked_twice_and_the_seed_alone_decides_them() -> None:
    asked = (replace(config("arithmetic", seed=seed), num_prompts=num) for num, seed in ((8100, 0), (10, 0), (10, 1)))
    prompts, few, other = map(arithmetic.prompts, asked)
    assert prompts[:10] == few != other
    assert len({prompt.rpartition("\n")[2] for prompt in prompts}) == 8100
    for prompt in prompts[:50]:
        *examples, question = prompt.split("\n")
        assert len(examples) == 3
        for example in examples:
            found = re.fullmatch(r"(\d\d) \* (\d\d) = (\d+)", example)
            assert found
            assert int(found[1]) * int(found[2]) == int(found[3])
            assert not example.startswith(question)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (" 3145\n", True),
        (" 3145", True),
        ("3145.", True),
        (" 3146\n", False),
        (" 31450\n", False),
        ("", False),
        (" 314", False),
        ("x 3145", False),
        (" 3145abc", False),
    ],
)
def test_only_the_whole_product_is_right(text: str, is_right: bool) -> None:
    assert arithmetic.is_right(line(PLAIN, [1], prompt="12 * 12 = 144\n37 * 85 =", text=text)) is is_right


def products(num_both: int, num_plain: int, num_fast: int, num_none: int) -> list[CompletionPair]:
    outcomes = num_both * [(1, 1)] + num_plain * [(1, 0)] + num_fast * [(0, 1)] + num_none * [(0, 0)]
    texts = " 145", " 144"
    return [
        CompletionPair(
            *(
                line(mode, [1], index=index, prompt="12 * 12 =", text=texts[right])
                for mode, right in zip((PLAIN, SPECULATIVE), rights, strict=True)
            )
        )
        for index, rights in enumerate(outcomes)
    ]


@pytest.mark.parametrize(
    ("counts", "passed", "words"),
    [
        ((200, 100, 100, 600), True, "shown to differ by less than 0.1"),
        ((0, 0, 0, 100), False, "are both 0, which shows nothing"),
        ((1, 0, 0, 99), True, "plain 1.0% and speculative 1.0% of 100"),
        ((100, 400, 100, 400), False, "not within the margin of 0.1"),
        ((2, 3, 3, 2), False, "more prompts, as num_prompts="),
        ((200, 60, 180, 560), False, "differ by 0.0"),
    ],
)
def test_rates_must_be_shown_to_be_equivalent(counts: tuple[int, ...], passed: bool, words: str) -> None:
    found = arithmetic.judge(evidence(config("arithmetic"), products(*counts)))
    assert found.passed is passed
    assert words in found.reason
    plain, fast, difference = found.measures
    assert plain.value == (counts[0] + counts[1]) / sum(counts)
    assert difference.value == pytest.approx(fast.value - plain.value)
    assert all(holds(measure, measure.value) for measure in found.measures)


@pytest.mark.parametrize(
    ("plain", "fast", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([2], [1], 0)]
)
def test_texts_part_at_their_first_difference(plain: list[int], fast: list[int], place: int | None) -> None:
    assert agreement.place_of_difference(CompletionPair(*both(plain, fast))) == place


def test_greedy_texts_of_a_reproducible_run_are_equal_or_fail() -> None:
    settings, known = config("agreement"), {(1, PLAIN, 0): [-1.0, -2.0], (1, SPECULATIVE, 0): [-1.0, -2.0]}
    apart, equal = CompletionPair(*both([1, 2], [1, 4], index=1)), CompletionPair(*both([1, 2], [1, 2]))
    for pairs, passed in (([equal, apart], False), ([equal], True)):
        found = agreement.judge(replace(evidence(settings, pairs, known), is_reproducible=True))
        assert found.passed is passed
    assert agreement.judge(evidence(settings, [equal, apart], known)).passed


@pytest.mark.parametrize(
    ("gap", "dtype", "task", "passed"),
    [
        (5e-4, Dtype.fp32, {}, True),
        (5e-3, Dtype.fp32, {}, False),
        (5e-3, Dtype.fp32, {"near_tie": 0.01}, True),
        (0.2, Dtype.bf16, {}, True),
        (0.6, Dtype.bf16, {}, False),
    ],
)
def test_greedy_texts_may_part_at_a_near_tie_alone(gap: float, dtype: Dtype, task: Any, passed: bool) -> None:
    pairs = [CompletionPair(*both([1, 2], [1, 2])), CompletionPair(*both([1, 2, 3], [1, 4, 5], index=1))]
    assert [each.key for each in agreement.scored(pairs)] == [(1, PLAIN, 0), (1, SPECULATIVE, 0)]
    settings = config("agreement", **task)
    settings.model = replace(settings.model, dtype=dtype)
    known = {(1, PLAIN, 0): [-1.0, -2.0, -9.0], (1, SPECULATIVE, 0): [-1.0, -2.0 - gap, -1.0]}
    found = agreement.judge(evidence(settings, pairs, known))
    assert found.passed is passed
    assert [measure.value for measure in found.measures[:3]] == [1, int(passed), int(not passed)]
    assert found.measures[-1].value == 0.5, "of two examined tokens in every text one was accepted"


def test_a_text_that_ends_where_the_other_goes_on_is_no_near_tie() -> None:
    known = {(0, PLAIN, 0): [-1.0, -2.0], (0, SPECULATIVE, 0): [-1.0]}
    found = agreement.judge(evidence(config("agreement", near_tie=100.0), [CompletionPair(*both([1, 2], [1]))], known))
    assert not found.passed


def samples(draw: random.Random, laws: tuple[list[float], list[float]], *, shift: float = 0.0) -> Evidence:
    """150 pairs of texts of up to 3 tokens for each of two prompts, whose tokens and log-likelihoods have two laws."""
    lines: list[CompletionLine] = []
    known: dict[Any, list[float]] = {}
    for index in range(2):
        for sample in range(150):
            ids = [draw.choices(range(4), law, k=draw.choice([2, 3])) for law in laws]
            pair = both(ids[0], ids[1], index=index, sample=sample)
            lines += pair
            known |= {pair[0].key: [draw.gauss(-5, 1)], pair[1].key: [draw.gauss(-5 + shift, 1)]}
    return evidence(config("distribution"), pairs_of(lines), known)


LAW, OTHER = [0.4, 0.3, 0.2, 0.1], [0.2, 0.3, 0.3, 0.2]


@pytest.mark.parametrize(
    ("laws", "shift", "passed"), [((LAW, LAW), 0.0, True), ((LAW, OTHER), 0.0, False), ((LAW, LAW), 0.5, False)]
)
def test_samples_pass_if_tokens_and_likelihoods_have_one_law(
    laws: tuple[list[float], list[float]], shift: float, passed: bool
) -> None:
    """The faults are missed with probability below 1e-3; the seed is fixed."""
    found = distribution.judge(samples(random.Random(1), laws, shift=shift))
    assert found.passed is passed, found.reason
    p_tokens, p_likelihoods, *_, difference, apart, chance = found.measures
    assert (min(p_tokens.value, p_likelihoods.value) > 2.5e-4) is passed
    assert holds(difference, shift)
    of_a_token = sum(abs(a - b) for a, b in zip(*laws, strict=True)) / 2
    assert holds(apart, (of_a_token + of_a_token + of_a_token / 2) / 3), "half of the texts have no third"
    assert 0 < chance.value < 0.2


def text_sums(value: float, *, shift: float = 0.0) -> TextSums:
    """A text of which each score has this value, with variance 1."""
    num = len(SCORES)
    return TextSums(
        values=[value] * num,
        variances=[1.0] * num,
        reaches=[2.0] * num,
        ranges=[3.0] * num,
        shifts=[[shift] * num] * len(FAULTS),
        drifts=[0.0] * num,
    )


def test_samples_that_agree_with_each_other_must_agree_with_the_target_too() -> None:
    """The sums alone decide here: 300 texts, whose sums are 2 and then 6 standard errors from 0."""
    known = samples(random.Random(1), (LAW, LAW))
    for z, passed in ((2.0, True), (6.0, False)):
        sums = [text_sums(z * 300**0.5 / 300, shift=0.5)] * 300
        found = distribution.judge(replace(known, sums=sums))
        assert found.passed is passed, found.reason
        measures = {measure.name: measure.value for measure in found.measures}
        assert measures["standard errors, surprise"] == pytest.approx(z)
        assert measures["probability of finding a residual drawn from the target"] > 0.98
        moved = measures["standard errors if there were a residual drawn from the target"]
        assert moved == pytest.approx(0.5 * 300 / 300**0.5)


def test_a_verdict_names_the_faults_that_it_could_not_have_found() -> None:
    known = samples(random.Random(1), (LAW, LAW))
    of_some = [[0.5 if fault == 0 else 1e-2 if fault == 1 else 0.0] * len(SCORES) for fault in range(len(FAULTS))]
    found = distribution.judge(replace(known, sums=[text_sums(0.0)._replace(shifts=of_some)] * 300))
    first, second, *others = FAULTS
    assert found.outcome == f"suite=distribution passed, but could not have found {second} (0.00)"
    assert replace(found, passed=False).outcome == "suite=distribution failed"
    assert found.reason.endswith("(300 pairs)")
    names = [measure.name for measure in found.measures]
    assert f"probability of finding {first}" in names
    assert not any(other in name for other in others for name in names if name.startswith("probability"))


@pytest.mark.seconds
def test_a_bound_holds_for_sums_of_rare_tokens_too() -> None:
    """A proposal of probability 1e-4 in 20000 texts: it comes up 8 times or more with probability 0.001."""
    [rare, *_] = sums_of(
        [
            text_sums(0.0)._replace(
                values=[6.0 / 20000] * len(SCORES), variances=[1e-4] * len(SCORES), reaches=[1.0] * len(SCORES)
            )
        ]
        * 20000
    ).values()
    assert rare.z > 4
    assert rare.p_value > 0.001


def test_the_roles_of_tokens_follow_from_the_lengths_of_rounds() -> None:
    found = roles_of([2, 0, 4, 1], [3, 1, 4, 0], num_tokens=12)
    first, accepted, drawn, bonus, other = Role.unused, Role.accepted, Role.resampled, Role.bonus, Role.other
    assert found == [first, accepted, accepted, drawn, drawn, *[accepted] * 4, bonus, other, other]
    assert roles_of([2], [3], num_tokens=4, overlaps=True) == [first, other, other, other]


def test_the_end_of_a_text_counts_as_a_token() -> None:
    pairs = [CompletionPair(*both([1], [1, 2], sample=sample)) for sample in range(40)]
    known = {each.key: [-1.0] for pair in pairs for each in pair}
    assert not distribution.judge(evidence(config("distribution"), pairs, known)).passed

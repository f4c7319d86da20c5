"""The arithmetic of audits: what checks promise, without a server."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from llama_ssp import load
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.evaluate.audit import checks
from llama_ssp.extensions.evaluate.audit.texts import Answered, Scored, TextReader
from llama_ssp.extensions.evaluate.law import LawSums
from llama_ssp.extensions.evaluate.martingales import FAULTS, SCORES, Role, Rounds, Sum, TextSums, roundings, sums_of
from llama_ssp.text.log_probs import TokenLogprob, TopLogprob

ROUNDED = (0.44, 0.28, 0.18, 0.1)
TARGET, DRAFT, K, NUM_TOKENS = (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4), 2, 12
FAULT = "a residual drawn from the target"


def drawn(draw: random.Random, *, faulty: bool) -> list[int]:
    """A text of rounds of K drafted tokens, after its first token."""
    ids = draw.choices(range(4), TARGET)
    rest = [max(p - q, 0.0) for p, q in zip(TARGET, DRAFT, strict=True)]
    while len(ids) < NUM_TOKENS:
        for _ in range(K):
            [token] = draw.choices(range(4), DRAFT)
            if draw.random() * DRAFT[token] >= TARGET[token]:
                ids += draw.choices(range(4), TARGET if faulty else rest)
                break
            ids.append(token)
        else:
            ids += draw.choices(range(4), TARGET)
    return ids[:NUM_TOKENS]


def sums_of_texts(texts: Sequence[Sequence[int]], stated: Sequence[float] | None = None) -> list[TextSums]:
    """The sums of texts that hide their rounds, and state this law or none."""
    sums, num = LawSums(len(texts), torch.device("cpu"), Rounds(longest=K)), len(texts)
    target_BV, draft_BV = (torch.tensor([law]).expand(num, -1) for law in (TARGET, DRAFT))
    ids_BT, stated_BV = torch.tensor(texts), torch.tensor([stated]).expand(num, -1) if stated else None
    for place in range(NUM_TOKENS):
        role = Role.hidden if place else Role.unused
        sums.add(
            ids_BT[:, place, None],
            target_BV,
            draft_BV,
            newest_BN=ids_BT[:, :place],
            roles_B=torch.full((num,), role),
            stated_BV=stated_BV,
        )
    return sums.of_texts()


@pytest.mark.seconds
@pytest.mark.parametrize("faulty", [True, False])
def test_a_fault_moves_texts_that_hide_their_rounds_as_far_as_they_say(faulty: bool) -> None:
    """The chance of a difference of 4 standard errors is 0.00006."""
    draw = random.Random(7)
    texts = sums_of_texts([drawn(draw, faulty=faulty) for _ in range(3000)])
    place, number = SCORES.index(FAULT), [*FAULTS].index(FAULT)
    apart = [text.values[place] - faulty * text.shifts[number][place] for text in texts]
    mean, shift = sum(apart) / len(apart), sum(text.shifts[number][place] for text in texts) / len(texts)
    error = math.sqrt(sum((one - mean) ** 2 for one in apart)) / len(apart)
    assert abs(mean) < 4 * error
    assert shift > 20 * error, "or the test would show nothing"


@pytest.mark.seconds
@pytest.mark.parametrize(("faulty", "outcome"), [(True, checks.FAILED), (False, checks.HELD)])
def test_sums_fail_by_what_they_have_beyond_the_tolerance(faulty: bool, outcome: str) -> None:
    draw = random.Random(3)
    sums = sums_of(sums_of_texts([drawn(draw, faulty=faulty) for _ in range(3000)]))
    assert checks.judge_sums("law", sums, {}, least_p=checks.OF_LAW).outcome == outcome
    of_half = checks.judge_sums("law", sums, checks.tolerated(sums, 0.5), least_p=checks.OF_LAW)
    assert of_half.outcome == checks.HELD
    assert "no fault would surely have been found" in of_half.said


@pytest.mark.seconds
@pytest.mark.parametrize(("faulty", "outcome"), [(True, checks.FAILED), (False, checks.HELD)])
def test_a_stated_law_explains_its_own_rounding_and_no_fault(faulty: bool, outcome: str) -> None:
    """A tenth of the texts state it; at its total variation, 0.04 at each place, no fault would show."""
    draw = random.Random(4)
    texts = [drawn(draw, faulty=True) if faulty else draw.choices(range(4), ROUNDED, k=NUM_TOKENS) for _ in range(3000)]
    stated, hidden = sums_of_texts(texts[:300], TARGET if faulty else ROUNDED), sums_of_texts(texts[300:])
    sums, rounding = sums_of([*stated, *hidden]), roundings(stated, len(texts))
    assert checks.judge_sums("law", sums, rounding, least_p=checks.OF_LAW).outcome == outcome
    assert checks.judge_sums("law", sums, {}, least_p=checks.OF_LAW).outcome == checks.FAILED
    of_variation = checks.judge_sums("law", sums, checks.tolerated(sums, 0.5), least_p=checks.OF_LAW)
    assert of_variation.outcome == checks.HELD
    allowed, range_ = rounding["surprise"], sums["surprise"].range
    assert allowed < 0.02 * range_


def a_sum(value: float) -> Sum:
    return Sum(value=value, variance=100.0, reach=1.0, range=1000.0, shifts=(500.0,) * len(FAULTS))


def test_without_a_tolerance_a_small_difference_is_not_judged() -> None:
    for value, outcome in ((5.0, checks.HELD), (80.0, checks.UNKNOWN), (300.0, checks.FAILED)):
        found = checks.judge_sums("law", {"surprise": a_sum(value)}, None, least_p=checks.OF_LAW)
        assert found.outcome == outcome, found.said
    found = checks.judge_sums("law", {"surprise": a_sum(80.0)}, None, least_p=checks.OF_LAW)
    assert "a total variation of 0.0" in found.said
    assert "give baseline= or task.tolerance=" in found.said


def log_probs(law: Sequence[float], ids: Sequence[int]) -> list[float]:
    return [math.log(law[token]) for token in ids]


def test_a_processor_is_judged_by_the_texts_of_either_law() -> None:
    """Of 400 honest texts of 200 tokens none is accused, where one in 70000 may be."""
    draw, asked, without = random.Random(1), TARGET, (0.25,) * 4
    outcomes = {checks.HELD: 0, checks.FAILED: 0, checks.UNKNOWN: 0}
    for _ in range(400):
        ids = draw.choices(range(4), asked, k=200)
        both = log_probs(asked, ids), {"ignored": log_probs(without, ids)}
        outcomes[checks.judge_processor("top_k", *both, num=9, variation=0.0).outcome] += 1
    assert outcomes[checks.FAILED] == 0
    assert outcomes[checks.HELD] > 300
    ids = draw.choices(range(4), without, k=400)
    both = log_probs(asked, ids), {"ignored": log_probs(without, ids)}
    assert checks.judge_processor("top_k", *both, num=9, variation=0.0).outcome == checks.FAILED
    assert checks.judge_processor("top_k", *both, num=9, variation=0.1).outcome == checks.UNKNOWN
    unknown = checks.judge_processor("top_k", *both, num=9, variation=None)
    assert unknown.outcome == checks.UNKNOWN
    assert "or rounding, which log-probabilities or task.tolerance= would tell" in unknown.said


@pytest.mark.parametrize("seed", range(10))
def test_a_rounded_setting_is_found_or_could_have_been_missed(seed: int) -> None:
    """Laws of temperatures 0.25 and 0.3; so many tokens miss the fault with probability 0.0001."""
    draw = random.Random(seed)
    asked, rounded = (
        [one ** (1 / value) / sum(other ** (1 / value) for other in TARGET) for one in TARGET] for value in (0.25, 0.3)
    )
    found = []
    for law, num in ((rounded, 6000), (asked, 6000), (asked, 200)):
        ids = draw.choices(range(4), law, k=num)
        faulty = {"ignored": log_probs(TARGET, ids), "rounded to 0.3": log_probs(rounded, ids)}
        found.append(checks.judge_processor("temperature", log_probs(asked, ids), faulty, num=11, variation=0.0))
    assert [one.outcome for one in found] == [checks.FAILED, checks.HELD, checks.HELD]
    assert found[0].said.startswith("temperature is rounded to 0.3")
    assert "missed" not in found[1].said
    assert found[2].said.endswith("could have missed: temperature rounded to 0.3")


@pytest.mark.parametrize("seed", range(10))
def test_a_token_that_comes_too_seldom_or_too_often_is_found(seed: int) -> None:
    """A true server fails with probability 0.00002."""
    draw, expected = random.Random(seed), {token: 300 * one for token, one in enumerate(TARGET)}

    def judged(law: Sequence[float], *, variation: float | None = 0.0) -> checks.Finding:
        came = Counter(draw.choices(range(4), law, k=300))
        return checks.judge_tokens(came, expected, vocab_size=512, variation=variation)

    true = judged(TARGET)
    assert true.outcome == checks.HELD
    assert "if it was expected 18 times (4 of 512 were); could have missed: one that was expected less" in true.said
    banned = judged((0.5, 0.3, 0.2, 0.0))
    assert banned == ("tokens", checks.FAILED, banned.said)
    assert banned.said.startswith("token 3 came 0 times for 30.0 expected")
    assert judged((0.1, 0.2, 0.3, 0.4)).outcome == checks.FAILED, "one four times as often"
    assert judged((0.5, 0.3, 0.2, 0.0), variation=None).outcome == checks.HELD, "rounding could have"
    few = checks.judge_tokens(Counter({0: 1}), {0: 1.0, 5: 11.0}, vocab_size=512, variation=0.0)
    assert few.outcome == checks.HELD
    assert "(0 of 512 were)" in few.said


def test_a_stop_ends_a_text_where_it_stands_and_neither_before_nor_after() -> None:
    decode: Callable[[Sequence[int]], str] = lambda ids: "".join("abcd"[token] for token in ids)  # noqa: E731
    whole = answer("abcdab", ids=(0, 1, 2, 3, 0, 1))

    def judged(text: str, ids: Sequence[int] | None, *, num: int = 8) -> tuple[str, str]:
        stopped = Answered(text, None if ids is None else tuple(ids), "stop", [], None)
        true = Answered("ab", (0, 1, 2, 3), "stop", [], None)
        found = checks.judge_stops([("cd", one, whole) for one in [stopped] * num + [true] * (8 - num)], decode)
        return found.outcome, found.said

    for text, ids in [("ab", [0, 1, 2, 3]), ("ab", None), ("ab", [0, 1]), ("bb", [1, 1, 2, 3])]:
        assert judged(text, ids)[0] == checks.HELD
    for text, late in [("ab", [0, 1, 2, 3, 0]), ("a", None), ("aba", None), ("", [])]:
        assert judged(text, late) == (checks.FAILED, "8 of 8 texts end before their stop, or after one token more")
        assert judged(text, late, num=4)[0] == checks.HELD, "rounding may let some go another way"
    assert judged("abcda", None)[1].startswith("8 of 8 texts go on after a stop")


def test_two_seeds_with_one_improbable_text_are_a_fault() -> None:
    """Two texts of 100 are one with probability 0.00002, if each has exp(-40)."""
    texts = [(((1,), (number,)), -60.0) for number in range(100)]
    pairs = [(answer(ids=(1,)), answer(ids=(1,)))]
    assert checks.judge_seeds(pairs, texts).outcome == checks.HELD
    failed = checks.judge_seeds(pairs, [*texts, texts[0]])
    assert failed.outcome == checks.FAILED
    assert failed.said.endswith("the same alone as among others; 2 texts are those of other seeds too")
    probable = [*texts, *[(((1,), (7, 7)), -5.0)] * 2]
    assert checks.judge_seeds(pairs, probable).outcome == checks.HELD
    assert "one text for two seeds, among 2 of 102 texts" in checks.judge_seeds(pairs, probable).said
    other = [(answer(ids=(1,)), answer(ids=(2,)))]
    assert checks.judge_seeds(other, texts).outcome == checks.NOTED


def places(slope: float, *, noise: float) -> list[tuple[Scored, TokenLogprob]]:
    """Places whose log-probabilities a server gives at another temperature, and rounded."""
    draw, found = random.Random(5), list[tuple[Scored, TokenLogprob]]()
    for _ in range(300):
        logits = [3 * draw.gauss(0, 1) for _ in range(20)]
        of_server = [slope * one + noise * draw.gauss(0, 1) for one in logits]
        ours, theirs = (
            [one - math.log(sum(map(math.exp, of_all))) for one in of_all] for of_all in (logits, of_server)
        )
        top = [TopLogprob(token=token, logprob=one) for token, one in enumerate(ours)]
        found.append((Scored(theirs[0], dict(enumerate(theirs))), TokenLogprob(token=0, logprob=ours[0], top=top)))
    return found


def test_log_probabilities_of_another_temperature_are_no_rounding() -> None:
    exact, shown = checks.judge_log_probs(places(1.0, noise=0.0))
    assert exact.outcome == checks.HELD
    assert shown == pytest.approx(0, abs=1e-9)
    rounded, shown = checks.judge_log_probs(places(1.0, noise=0.03))
    assert rounded.outcome == checks.HELD
    assert shown
    assert 0.003 < shown < 0.1
    hotter, shown = checks.judge_log_probs(places(0.9, noise=0.03))
    assert (hotter.outcome, shown) == (checks.FAILED, None)
    assert "temperature 1.1" in hotter.said
    first, *others = places(1.0, noise=0.0)
    apart, shown = checks.judge_log_probs([(Scored(-9.0, {0: -0.001}), first[1])] * 10 + others)
    assert (apart.outcome, shown) == (checks.FAILED, None)
    assert "10 places are above 0.1" in apart.said
    certain = [(Scored(0.0, {}), known) for scored, known in others[:10] if scored.own < -0.5]
    drafted, shown = checks.judge_log_probs([*certain, *others])
    assert (drafted.outcome, shown) == (checks.FAILED, None), "drafted tokens with probability 1"
    assert f"{len(certain)} places are above 0.1" in drafted.said
    with pytest.raises(ConfigError, match="another model's: over 300 places"):
        checks.judge_log_probs(places(1.0, noise=2.0))


def test_the_contexts_that_differ_most_are_shown() -> None:
    laws = [math.log(one) for one in TARGET]
    texts = [((9,), (token,), (laws[token],)) for token in [0] * 20 + [3] * 80]
    first, *_ = checks.worst_contexts(texts)
    assert (first.before, first.token, first.num_came, first.num_texts) == ((9,), 3, 80, 100)
    assert first.num_expected == pytest.approx(10)


def test_greedy_texts_are_judged_by_how_far_they_part() -> None:
    same, tie, apart = (checks.judge_greedy([[0.0], [gap]], near_tie=0.1, is_known=True) for gap in (0.0, 0.05, 2.0))
    assert same == ("greedy", checks.HELD, "2 of 2 texts are the target's best tokens")
    assert (tie.outcome, apart.outcome) == (checks.HELD, checks.FAILED)
    assert tie.said.endswith("the others part at near ties, of at most 0.1 nats")
    assert checks.judge_greedy([[2.0]], near_tie=0.1, is_known=False).outcome == checks.UNKNOWN


def answer(text: str = "", ids: Sequence[int] | None = None) -> Answered:
    return Answered(text, None if ids is None else tuple(ids), "length", [], None)


def test_the_swap_test_needs_no_weights() -> None:
    """A true pair fails with probability 0.00006."""
    draw = random.Random(2)

    def pairs(*laws: Sequence[float]) -> list[tuple[Answered, Answered]]:
        both = [[draw.choices(range(4), law, k=10) for law in laws] for _ in range(300)]
        return [(answer(ids=one), answer(ids=other)) for one, other in both]

    assert checks.judge_swaps([pairs(TARGET, TARGET)]).outcome == checks.HELD
    assert checks.judge_swaps([pairs(TARGET, DRAFT)]).outcome == checks.FAILED


def test_token_ids_are_read_as_servers_say_them() -> None:
    pair = load("tiny")
    tokenizer, [eos] = pair.tokenizer, pair.models.eos_ids
    reader = TextReader(tokenizer, vocab_size=pair.models.target.vocab_size, eos_ids=[eos])
    ids = tokenizer("def factorial(n):", add_special_tokens=False).input_ids
    pieces = [str(tokenizer.decode([token])) for token in ids]

    def read(**choice: object) -> tuple[int, ...] | None:
        return reader.read({"choices": [{"finish_reason": "length"} | choice]}, ends=True).ids

    content = [{"token": "?", "bytes": [*piece.encode()], "logprob": -1.0} for piece in pieces]
    assert read(token_ids=ids) == read(tokens=ids) == tuple(ids)
    assert read(logprobs={"tokens": [f"token_id:{token}" for token in ids]}) == tuple(ids)
    assert read(logprobs={"content": content}) == tuple(ids)
    assert read(text="def factorial(n):") is None
    assert read(text="def", logprobs={"content": []}) is None
    assert read(text="", logprobs={"content": []}, finish_reason="stop") == (eos,), "ends at once"
    assert read(logprobs={"tokens": [*pieces, "\ufffd"]}) is None, "a part of a character"
    assert read(token_ids=ids, finish_reason="stop") == (*ids, eos), "some servers leave the last token out"
    assert read(token_ids=[*ids, eos], finish_reason="stop") == (*ids, eos)

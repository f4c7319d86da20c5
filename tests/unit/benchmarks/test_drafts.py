"""The comparison of drafts: a best K that is not chosen by the times it is compared with, and the page."""

import pytest

from benchmarks import drafts
from benchmarks.acceptance import kinds_of_text
from benchmarks.drafts import AUTO, LOSING, NGRAM, PEER_NGRAM, PLAIN, Result
from llama_ssp import load

PLAIN_MS, OTHER_MS = [4.0] * 4, [3.0] * 4


def result(**fixed: list[float]) -> Result:
    """Two repetitions of each of two builds; `k2` are the times of K=2."""
    ms = {PLAIN: PLAIN_MS, **{f"K={name[1:]}": values for name, values in fixed.items()}, AUTO: [2.0] * 4}
    return Result(ms=ms | {NGRAM: OTHER_MS, PEER_NGRAM: [10.0] * 4}, tokens_per_round={"K=2": 1.5})


def test_the_best_k_of_one_build_is_compared_in_the_other() -> None:
    lucky = result(k2=[1.0, 1.0, 2.0, 2.0], k4=[2.0, 2.0, 1.0, 1.0])
    assert lucky.ratio(AUTO, lucky.best_fixed) == pytest.approx(1.5)
    assert lucky.over_best_fixed(AUTO) == pytest.approx(1.0)
    steady = result(k2=[1.0] * 4, k4=[2.0] * 4)
    assert steady.over_best_fixed(AUTO) == pytest.approx(2.0)


def test_the_page_has_a_table_for_each_text_and_the_goals() -> None:
    one = result(k2=[2.0] * 4, k4=[3.0] * 4)
    losing = Result(ms={PLAIN: PLAIN_MS, "K=1": [9.0] * 4, AUTO: PLAIN_MS}, tokens_per_round={})
    page = drafts.page({"repeated code": one, LOSING: losing}, repetitions=2)
    assert "| **K=2** | 2.00 | 0.50 |  | 1.50 |  |" in page
    assert "| K=4 | 3.00 | 0.75 |  |" in page
    assert "| repeated code: K=auto / the best K | 1.00 | 1.05 |" in page
    assert f"| {LOSING}: K=auto / plain | 1.00 | 1.03 |" in page
    assert "| repeated code: prompt look-up / transformers' prompt look-up | 0.30 | 0.5 |" in page


@pytest.mark.heavy
def test_candidates_take_one_prompt_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "NUM_NEW_TOKENS", 4)
    pair, names = load("tiny", "tiny-draft", dtype="fp32"), {PLAIN, "K=2", NGRAM}
    measured = drafts.measure(pair, kinds_of_text()["code"], names=names, peers={}, repetitions=3, num_builds=2)
    assert {name: len(values) for name, values in measured.ms.items()} == dict.fromkeys(names, 3 * 2)
    assert measured.tokens_per_round["K=2"] >= 1

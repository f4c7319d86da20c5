"""The page of batches: from which batch on speculation loses, and next to whom."""

from benchmarks import batches
from benchmarks.batches import AUTO, BEST, FAST, GENERATE, LLAMA_CPP, PLAIN, Cell


def cell(plain: float, fast: float, auto: float, **others: float) -> Cell:
    speeds = {PLAIN: plain, FAST: fast, AUTO: auto} | others
    return Cell(
        tokens_per_s={name: [speed] for name, speed in speeds.items()}, tokens_per_round={FAST: 3.0}, plain_share=0.25
    )


def test_the_page_says_from_which_batch_on_speculation_loses() -> None:
    cells = {1: cell(100, 150, 140), 8: cell(400, 390, 350, **{GENERATE: 40, LLAMA_CPP: 480}), 32: cell(800, 400, 790)}
    page = batches.page({("one pair", 16): cells, ("another", 16): {1: cell(1, 2, 2)}}, turns=1, vllm=None)
    assert f"| {PLAIN} | 100 | 400 | 800 |" in page
    assert f"| {LLAMA_CPP} |  | 480 |  |" in page
    assert f"| {FAST} / {PLAIN} | 1.50 | 0.97 | 0.50 |" in page
    assert f"Speculation with {FAST} loses from 8 rows on." in page
    assert f"{FAST} gains at all of them." in page
    assert f"| {AUTO} / {BEST} | 0.93 | 0.88 | 0.99 |" in page
    assert f"| {LLAMA_CPP} / {PLAIN} |  | 1.20 |  |" in page

"""The page of batches: from which batch on speculation loses, and next to whom."""

from benchmarks import batches
from benchmarks.batches import AUTO, FAST, GENERATE, LLAMA_CPP, PLAIN, Cell


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
    assert f"| one pair, 16 tokens, 1 rows: {FAST} / {AUTO} | 1.07 | 1.1 | holds |" in page
    assert f"| one pair, 16 tokens, 8 rows: {PLAIN} / {AUTO} | 1.14 | 1.1 | **missed** |" in page
    assert f"| one pair, 16 tokens, 8 rows: {LLAMA_CPP} / {PLAIN} | 1.20 | 1 | **missed** |" in page

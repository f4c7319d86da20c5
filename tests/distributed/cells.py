"""The table of placements under test."""

from dataclasses import replace
from functools import partial

import pytest

from llama_ssp.settings.schema import DraftLayout
from tests.distributed.ranks import ONE_PASS, SYNTHETIC, Cell

ONE_RANK, SHARDED, REPLICATED, OWN_GPU = DraftLayout
BOTH, ALL_3, ALL_4 = (0, 1), (0, 1, 2), (0, 1, 2, 3)
HEAVY_PAIRS, SLOW_PAIRS = ("llama", "gpt_neox", "gpt_neo"), ("qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")


heavy, slow = partial(Cell, lane="heavy"), partial(Cell, lane="slow")


def greedy(cell: Cell) -> Cell:
    return replace(cell, temperature=0.0)


# A greedy text is the same whatever was drafted, so that sampled ones say more of a draft's placement.
_SAMPLED = [
    slow((0,), (0,), SHARDED),
    slow((0,), (0,), REPLICATED),
    # Chains on two ranks.
    slow(BOTH, (1,)),
    slow(BOTH, (0,), SHARDED),
    Cell(BOTH, BOTH, SHARDED),
    slow(BOTH, (0,), pair="head", batch_size=3),
    Cell(BOTH, BOTH, SHARDED, pair="head", batch_size=3),
    heavy(BOTH, BOTH, REPLICATED, pair="head", batch_size=3, updates=True),
    heavy(BOTH, BOTH, SHARDED, pair="mtp glm4_moe", batch_size=3, updates=True),
    slow(BOTH, BOTH, SHARDED, pair="mtp qwen2", batch_size=3),
    heavy((0,), (1,), OWN_GPU, pair="mtp qwen2", batch_size=3, tree="2x2x1"),
    slow(BOTH, BOTH, REPLICATED, pair="mtp qwen3_next", batch_size=3),
    heavy(BOTH, BOTH, SHARDED, pair=f"{ONE_PASS}dspark of DeepSpec", batch_size=3),
    slow(BOTH, (0,), pair=f"{ONE_PASS}peagle", batch_size=3),
    heavy(BOTH, BOTH, SHARDED, pair=f"{ONE_PASS}dflash 2 of its authors", batch_size=3, tree="2x2x1"),
    heavy((0,), (1,), OWN_GPU, pair=f"{ONE_PASS}dflash of its authors", batch_size=3, tree="2x2x1"),
    slow(BOTH, BOTH, REPLICATED, pair=f"{ONE_PASS}recurrent dspark", batch_size=3),
    slow((1,), BOTH, SHARDED),
    slow(BOTH, BOTH, SHARDED, pair="llama", batch_size=1),
    heavy(BOTH, BOTH, SHARDED, pair="gpt_neox", batch_size=3, updates=True),
    slow(BOTH, BOTH, REPLICATED, pair="llama", batch_size=1),
    slow(BOTH, BOTH, REPLICATED, pair="gpt_neox"),
    slow(BOTH, BOTH, SHARDED, pair="gpt_neo", batch_size=1),
    slow(BOTH, BOTH, REPLICATED, pair="gpt_neo", batch_size=3),
    slow((0,), (1,), OWN_GPU, pair="gpt_neo", batch_size=3),
    heavy(BOTH, (0,), pair="gpt_neo", batch_size=9),
    # Trees.
    Cell(BOTH, BOTH, SHARDED, tree="3x2x1", batch_size=5),
    Cell(BOTH, (), REPLICATED, tree="3x2x1", batch_size=5),
    slow(BOTH, BOTH, SHARDED, tree="dynamic-8x3x3", batch_size=5),
    slow((0,), (1,), OWN_GPU, pair="head", tree="2x2x1", batch_size=3),
    # Other rules, and a K that is chosen.
    slow(BOTH, BOTH, REPLICATED, rule="block"),
    heavy(BOTH, BOTH, SHARDED, rule="block"),
    heavy(BOTH, (), SHARDED, rule="coupled", adapts=True),
    slow(BOTH, BOTH, REPLICATED, rule="coupled", adapts=True),
    slow(BOTH, BOTH, REPLICATED, rule="coupled"),
    slow(BOTH, (0,), SHARDED, rule="coupled", adapts=True),
    slow((0,), (1,), OWN_GPU, rule="block"),
    slow((0,), (1,), OWN_GPU, rule="coupled"),
    heavy((1,), (0,), OWN_GPU, pair="head", batch_size=3, rule="coupled", adapts=True),
    # Drafting overlaps verification.
    heavy((1,), (0,), OWN_GPU, batch_size=1, overlaps=True),
    slow((0,), (1,), OWN_GPU, batch_size=1, rule="coupled", overlaps=True),
    heavy((1,), (0,), OWN_GPU, batch_size=5, rule="coupled", overlaps=True),
    slow(BOTH, (2,), OWN_GPU, batch_size=5, overlaps=True),
    slow((0,), (1, 2), OWN_GPU, batch_size=1, rule="coupled", overlaps=True),
    # Stages of layers; the first ranks have the last one.
    Cell(BOTH, (0,), stages=2),
    Cell(BOTH, (1,), stages=2, batch_size=5),
    Cell(BOTH, BOTH, SHARDED, stages=2, tree="3x2x1", batch_size=5),
    Cell(BOTH, (0,), stages=2, pair="head", batch_size=3),
    heavy(BOTH, (), stages=2, rule="coupled", adapts=True),
    heavy(BOTH, (0,), stages=2, rule="block", updates=True),
    heavy(BOTH, (1,), stages=2, pair="head", tree="dynamic-8x3x3", batch_size=3),
    heavy(BOTH, (0,), REPLICATED, stages=2, pair="mtp qwen2", batch_size=3),
    heavy(ALL_3, (0,), stages=3),
    Cell(BOTH, (0,), pair="gpt_neox", stages=2, batch_size=3),
    heavy(BOTH, (0,), pair="mtp glm4_moe", stages=2, batch_size=3, updates=True),
    heavy(BOTH, (0,), pair="mtp qwen3_next", stages=2, batch_size=3),
    slow(BOTH, (1,), pair="gpt_neo", stages=2, batch_size=3),
    # Groups of rows that follow each other through stages.
    Cell(BOTH, (0,), stages=2, groups=2, batch_size=5),
    heavy(BOTH, BOTH, SHARDED, stages=2, groups=3, tree="3x2x1", batch_size=5),
    heavy(BOTH, (0,), stages=2, groups=2, pair="head", batch_size=3),
    heavy(BOTH, (0,), stages=2, groups=2, pair="mtp qwen3_next", batch_size=3),
    slow(ALL_4, (0,), stages=4, groups=4),
    slow(BOTH, (2,), OWN_GPU, stages=2, groups=2, batch_size=5, overlaps=True),
    slow(ALL_4, BOTH, SHARDED, pair="mtp glm4_moe", stages=2, batch_size=3, tree="2x2x1"),
    slow(ALL_4, BOTH, SHARDED, pair="gpt_neox", stages=2),
    heavy(BOTH, (2,), OWN_GPU, stages=2, batch_size=5, overlaps=True),
    slow(ALL_4, BOTH, SHARDED, stages=2),
    slow(ALL_4, BOTH, REPLICATED, stages=2, rule="block"),
    slow(ALL_4, ALL_4, SHARDED, stages=2),
    slow(ALL_4, (0,), stages=4),
    slow(ALL_4, (2,), stages=2, pair="head", batch_size=3),
    slow(ALL_4, (4,), OWN_GPU, stages=2, pair="head", tree="2x2x1", batch_size=3),
    # More ranks.
    Cell(ALL_3, (2,)),
    Cell(ALL_3, ALL_3, REPLICATED),
    Cell(ALL_3, ALL_3, SHARDED, pair="head", batch_size=5),
    slow(ALL_3, (1,), SHARDED),
    slow(ALL_3, (1, 2), SHARDED),
    slow((1, 2), (0,), OWN_GPU),
    slow((0, 2), (1, 2), SHARDED),
    slow((1,), (0, 2), OWN_GPU),
    slow(BOTH, (2,), OWN_GPU, pair="gpt_neox", batch_size=1),
    Cell(ALL_4, (3,)),
    Cell(ALL_4, (2,), SHARDED),
    Cell(ALL_4, (1, 2), SHARDED),
    Cell(ALL_4, ALL_4, SHARDED),
    Cell(ALL_4, ALL_4, REPLICATED),
    Cell(ALL_4, (1, 3), REPLICATED),
    Cell(ALL_3, (3,)),
    Cell((1, 3), (0, 2), OWN_GPU),
    Cell(ALL_4, BOTH, SHARDED, pair="gpt_neox"),
    Cell(ALL_4, ALL_4, REPLICATED, pair="gpt_neox", batch_size=3),
    Cell(ALL_4, (4,), OWN_GPU),
]
_BOTH_TEMPERATURES = [
    Cell(BOTH, (0,)),
    slow(ALL_3, (0,)),
    Cell((0,), (1,), OWN_GPU),
    heavy((0,), (1,), OWN_GPU, pair="head", tree="dynamic-8x3x3", batch_size=3),
    *(slow(BOTH, (0,), pair=pair, batch_size=9) for pair in ("llama", "gpt_neox")),
    *(slow(target, (0,), pair=pair, batch_size=9) for target in (BOTH, ALL_3, ALL_4) for pair in SLOW_PAIRS),
    *(slow(target, (0,), pair=pair, batch_size=9) for target in (ALL_3, ALL_4) for pair in ("head", *HEAVY_PAIRS)),
    *(slow(target, (0,), is_long=True) for target in (BOTH, ALL_3, ALL_4)),
]
CELLS = [
    *_SAMPLED,
    *_BOTH_TEMPERATURES,
    *map(greedy, _BOTH_TEMPERATURES),
    greedy(slow(BOTH, (0,), pair="gpt_neo", batch_size=9)),
    greedy(slow(BOTH, (0,), pair=SYNTHETIC)),
    *(greedy(slow(target, (0,), pair=SYNTHETIC)) for target in (ALL_3, ALL_4)),
    greedy(heavy(BOTH, BOTH, SHARDED)),
    greedy(Cell(BOTH, (0,), stages=2)),
    *(greedy(slow(ALL_4, (0,), stages=number)) for number in (2, 4)),
    greedy(heavy(BOTH, (0,), pair="mtp qwen3_next", stages=2, batch_size=3)),
    greedy(slow(BOTH, (0,), pair="mtp glm4_moe", stages=2, batch_size=3)),
    greedy(slow(BOTH, BOTH, SHARDED, pair="head", batch_size=3)),
    greedy(heavy(BOTH, BOTH, SHARDED, pair=f"{ONE_PASS}dflash", batch_size=3)),
    greedy(heavy(BOTH, BOTH, SHARDED, pair=f"{ONE_PASS}dflash 2 of its authors", batch_size=3)),
    greedy(slow(BOTH, BOTH, SHARDED, pair="gpt_neox", batch_size=3)),
    greedy(slow(BOTH, BOTH, REPLICATED, adapts=True)),
    greedy(heavy(ALL_3, ALL_3, SHARDED, pair="llama", batch_size=3)),
    greedy(heavy(BOTH, (2,), OWN_GPU, batch_size=5, overlaps=True)),
    greedy(slow(BOTH, BOTH, SHARDED, tree="3x2x1", batch_size=5)),
    greedy(slow((0,), (1,), OWN_GPU, batch_size=5, overlaps=True)),
    greedy(slow((0,), (1, 2), OWN_GPU, batch_size=5, overlaps=True)),
]
ALONE = [
    greedy(cell.alone)
    for cell in (
        slow((0,), (0,), pair=SYNTHETIC),
        Cell((0,), (0,)),
        Cell((0,), (0,), pair="head"),
        *(heavy((0,), (0,), pair=pair) for pair in HEAVY_PAIRS),
        *(slow((0,), (0,), pair=pair) for pair in SLOW_PAIRS),
    )
]
"""One for each pair, all others of the pair are compared with."""


def each_of(cells: list[Cell]) -> pytest.MarkDecorator:
    lanes = {"default": [], "heavy": [pytest.mark.heavy], "slow": [pytest.mark.slow]}
    least = {3: "heavy", 4: "slow", 5: "slow"}

    def marks(cell: Cell) -> list[pytest.MarkDecorator]:
        lane = max(cell.lane, least.get(cell.num_ranks, "default"))
        return [pytest.mark.distributed(cell.num_ranks), *lanes[lane]]

    return pytest.mark.parametrize("case", [pytest.param(cell, marks=marks(cell), id=str(cell)) for cell in cells])

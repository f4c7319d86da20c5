"""Layer-wise targets beside drafts on other ranks: the text of one rank, and the bytes that the planner says."""

from dataclasses import replace
from pathlib import Path

from tests.distributed.cells import BOTH, OWN_GPU, SHARDED, each_of, heavy, slow
from tests.distributed.ranks import Cell, Seen
from tests.distributed.test_placement import check_bytes, check_text_of_one_rank

CELLS = [
    replace(cell, target_kind="accelerate")
    for cell in (
        heavy((0,), (0,), pair="llama", batch_size=1),
        heavy((0,), (0,), pair="gpt_neo", batch_size=3),
        heavy((0,), BOTH, SHARDED),
        slow((1,), (0,), OWN_GPU, pair="gpt_neox", batch_size=3),
        slow((1,), (0, 2), OWN_GPU, pair="gpt_neo", batch_size=1),
    )
]


@each_of(CELLS)
def test_text_is_that_of_one_rank_wherever_the_draft_sits(case: Cell, pairs: Path, seen: Seen) -> None:
    check_text_of_one_rank(case, pairs, seen)


@each_of(CELLS)
def test_as_many_bytes_arrive_in_a_round_as_the_planner_says(case: Cell, pairs: Path, seen: Seen) -> None:
    check_bytes(case, pairs, seen)

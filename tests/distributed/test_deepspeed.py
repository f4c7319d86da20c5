"""Targets that DeepSpeed shares: the text of one rank without it. Needs the package, which few machines have."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import DEEPSPEED_CELLS, Cell, on_one_rank
from tests.distributed.test_placement import library
from tests.helpers.texts import few_part, part_at_a_near_tie

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: ./machine-install.sh --deepspeed"),
]
Seen = list[dict[str, Any]]
cells = pytest.mark.parametrize(
    ("cell", "num_ranks"),
    [
        pytest.param(cell, num_ranks, marks=pytest.mark.distributed(num_ranks), id=str(cell))
        for num_ranks, row in DEEPSPEED_CELLS.items()
        for cell in row
    ],
)


def texts_of(
    cell: Cell, num_ranks: int, temperature: float, launched: Callable[..., Seen]
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """What one rank makes of a pair without DeepSpeed, and what every rank of the cell makes of it."""
    (own,) = launched(1, "deepspeed")
    alone: list[list[int]] = own[f"{on_one_rank(cell)} at {temperature}"]["texts"]
    return alone, [seen[f"{cell} at {temperature}"]["texts"] for seen in launched(num_ranks, "deepspeed")]


@cells
def test_greedy_text_is_that_of_one_rank(
    cell: Cell, num_ranks: int, pairs: Path, launched: Callable[..., Seen]
) -> None:
    model, prompts = library(cell.pair, pairs)
    alone, placed = texts_of(cell, num_ranks, 0.0, launched)
    for texts in placed:
        triples = zip(prompts, alone, texts, strict=True)
        num_near_ties = sum(part_at_a_near_tie(model, prompt_ids, wanted, ids) for prompt_ids, wanted, ids in triples)
        assert num_near_ties <= len(prompts) / 50


@cells
def test_sampled_text_is_that_of_one_rank(cell: Cell, num_ranks: int, launched: Callable[..., Seen]) -> None:
    alone, placed = texts_of(cell, num_ranks, 0.8, launched)
    assert all(few_part(alone, texts) for texts in placed)

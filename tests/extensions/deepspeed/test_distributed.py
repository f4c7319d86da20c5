"""Targets that DeepSpeed shares: the text of one rank without it. Needs the package, which few machines have."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.cells import BOTH, REPLICATED, SHARDED, each_of, greedy, slow
from tests.distributed.ranks import Cell, Seen
from tests.distributed.test_placement import check_texts

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs ./machine-install.sh --deepspeed")
CELLS = [
    replace(each, target_kind="deepspeed")
    for cell in (
        slow((0,), (0,), batch_size=9),
        slow(BOTH, (0,)),
        slow(BOTH, BOTH, SHARDED, pair="llama", batch_size=3),
        slow(BOTH, BOTH, REPLICATED, pair="gpt_neox", batch_size=3),
    )
    for each in (cell, greedy(cell))
]


@each_of(CELLS)
def test_text_is_that_of_one_rank(case: Cell, pairs: Path, seen: Seen) -> None:
    [alone] = seen(case.alone)
    for placed in seen(case):
        check_texts(case, pairs, alone.texts, placed.texts)

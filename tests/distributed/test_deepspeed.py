"""Targets that DeepSpeed shares: the text of one rank without it. Needs the package, which few machines have."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.cells import DEEPSPEED_CELLS, each_of
from tests.distributed.ranks import Cell, Seen
from tests.distributed.test_placement import check_texts

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs ./machine-install.sh --deepspeed")


@each_of(DEEPSPEED_CELLS)
def test_text_is_that_of_one_rank(case: Cell, pairs: Path, seen: Seen) -> None:
    [alone] = seen(case.alone)
    for placed in seen(case):
        check_texts(case, pairs, alone.texts, placed.texts)

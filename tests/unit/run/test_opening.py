"""What a run opens on every rank."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_ssp.run import opening


@pytest.fixture
def _closed() -> Iterator[None]:
    root = logging.getLogger()
    level, raises = root.level, logging.raiseExceptions
    yield
    opening._close_logs()
    root.setLevel(level)
    logging.raiseExceptions = raises


@pytest.mark.usefixtures("_closed")
def test_a_rank_whose_node_does_not_share_the_run_folder_keeps_its_log_in_one_of_its_own(tmp_path: Path) -> None:
    opening._open_logs(tmp_path / "runs" / "first", rank=1)
    logging.getLogger("llama_ssp.run").info("here")
    assert "here" in (tmp_path / "runs" / "first" / "ranks" / "001.log").read_text()

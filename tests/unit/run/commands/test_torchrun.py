"""Under torchrun, rank 0 reports for all ranks of its node, where torchrun quotes it."""

import json
import threading
from pathlib import Path

import pytest

from llama_ssp.errors import InterruptedRun
from llama_ssp.ranks.process import Ranks
from llama_ssp.run.commands import torchrun
from llama_ssp.run.commands.run import fail
from tests.helpers.commands import run

RANKS = [Ranks(rank=rank, size=4, local_rank=rank % 2, local_size=2) for rank in range(4)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The error files of two ranks of a node; nobody waits long."""
    monkeypatch.setattr(torchrun, "SILENCE_S", 0.05)
    monkeypatch.setattr(torchrun, "_READERS_S", 0.05)
    monkeypatch.setattr(torchrun, "_LEAD_S", 0.0)
    for local_rank in (0, 1):
        (tmp_path / str(local_rank)).mkdir()
    return [tmp_path / str(local_rank) / "error.json" for local_rank in (0, 1)]


def test_another_rank_ends_with_0_once_rank_0_of_its_node_has_reported(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(torchrun.ERROR_FILE, str(files[1]))
    assert not torchrun.await_report(RANKS[1])
    monkeypatch.setenv(torchrun.ERROR_FILE, str(files[0]))
    torchrun.report("no such model", RANKS[0])
    assert json.loads(files[0].read_text())["message"]["message"] == "no such model"
    monkeypatch.setenv(torchrun.ERROR_FILE, str(files[1]))
    assert fail(InterruptedRun("interrupted"), RANKS[1]) == 0, "also one that was interrupted"
    assert files[1].with_name("seen.json").exists()
    assert not torchrun.await_report(RANKS[3]), "rank 0 of the run is on another node"


def test_rank_0_stays_until_a_rank_that_starts_late_has_seen_its_report(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "_READERS_S", 30.0)
    seen = files[1].with_name("seen.json")
    late = threading.Timer(0.2, seen.touch)
    late.start()
    monkeypatch.setenv(torchrun.ERROR_FILE, str(files[0]))
    torchrun.report("no such model", RANKS[0])
    assert seen.exists()
    late.join()


def test_without_torchrun_every_rank_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "SILENCE_S", 0.0)
    monkeypatch.delenv(torchrun.ERROR_FILE, raising=False)
    torchrun.report("no such model", RANKS[0])
    assert not torchrun.await_report(RANKS[1])


@pytest.mark.heavy
def test_torchrun_reports_one_rank_in_its_own_words_and_fails() -> None:
    ended = run(["model=nosuch"], num_ranks=4)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert [line for line in lines if line.startswith("unknown model 'nosuch'")] == lines[:1]
    assert sum("exitcode  :" in line for line in lines) == 1, "only rank 0 has failed"
    assert "traceback : unknown model 'nosuch'" in lines[-2]
    assert not any("closing signal" in line for line in lines), "no rank had to be ended"
    assert len(lines) <= 36, ended.stderr

"""The exit code of a run on ranks of its own, from how its ranks ended."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.run.commands.agent import exit_code_of

KILLED, STOPPED = -signal.SIGKILL, -signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "was_stopped", "exit_code", "said"),
    [
        ({}, False, 0, ""),
        ({1: 4, 0: 3}, False, 3, ""),
        ({0: KILLED, 1: 1}, False, 1, ""),
        ({1: KILLED, 0: 4}, False, 1, "rank 1 was ended by SIGKILL (the kernel does that when memory is exhausted); "),
        ({0: STOPPED}, False, 1, "rank 0 was ended by SIGTERM; run the same command with the same run_dir to resume"),
        ({1: KILLED, 0: 4}, True, 4, ""),
        ({0: KILLED, 1: KILLED}, True, 1, ""),
    ],
)
def test_the_code_is_that_of_the_lowest_rank_and_a_loss_that_no_rank_has_reported_is_named(
    codes: dict[int, int], was_stopped: bool, exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures: Any = {rank: SimpleNamespace(exitcode=code) for rank, code in codes.items()}
    assert exit_code_of(failures, was_stopped=was_stopped) == exit_code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert bool(err) == bool(said)

"""A process whose main thread is stuck inside a library ends with the sentence, the status and the code of the run."""

import os
import subprocess
import sys
import time

import pytest

from llama_ssp.errors import SspError
from llama_ssp.ranks import failures
from llama_ssp.ranks.failures import ControlChannel, Phase, guard
from llama_ssp.ranks.gpu import DeviceWait
from tests.helpers.disturbed import wait_for
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds
PHASE = Phase(doing="decoding", limit="timeouts.decode_s=0.2")
SENTENCE = "rank 1 is missing while decoding ({}); run the same command with the same run_dir to resume"


class Peers(ControlChannel):
    """Rank 1 of two leaves calls unanswered, from the given call on, or always."""

    def __init__(self, *, alarmed: bool = False, answers: int = 0, silent_calls: int = 10**9) -> None:
        super().__init__(None, rank=0, size=2, is_first_here=True)
        self._is_alarmed = alarmed
        self._answers, self._silent_calls = answers, silent_calls
        self.num_calls = 0

    def missing(self) -> tuple[int, ...]:
        self.num_calls += 1
        is_silent = self._answers < self.num_calls <= self._answers + self._silent_calls
        return (1,) if is_silent else ()


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes that the watchdog chose."""
    chosen: list[int] = []
    monkeypatch.setattr(os, "_exit", chosen.append)
    monkeypatch.setattr(failures, "_WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(failures, "_NOTICE_S", 0.1)
    return chosen


def waits(*, timeout_s: float = 0.2) -> DeviceWait:
    made = DeviceWait(lambda: False)
    made.timeout_s = timeout_s
    return made


@pytest.mark.parametrize(
    ("peers", "timeout_s", "cause"),
    [
        (Peers(alarmed=True), 600.0, "connection closed"),
        (Peers(), 0.2, "no answer within timeouts.decode_s=0.2"),
        (Peers(answers=2), 0.05, "no answer within timeouts.decode_s=0.2"),
    ],
    ids=["killed", "stopped", "stopped after a while"],
)
def test_a_stuck_main_thread_ends_with_the_sentence_and_the_code_of_a_lost_rank(
    peers: Peers, timeout_s: float, cause: str, codes: list[int]
) -> None:
    reported = list[SspError]()
    with guard(peers, waits(timeout_s=timeout_s), PHASE, report=reported.append):
        wait_for(lambda: codes, at_most_s=10)
    assert [str(error) for error in reported] == [SENTENCE.format(cause)]
    assert reported[0].speaks
    assert codes == [1]


@pytest.mark.parametrize(
    ("peers", "timeout_s", "num_calls"),
    [(Peers(silent_calls=0), 600.0, 0), (Peers(silent_calls=2), 0.05, 3), (Peers(silent_calls=0), 0.05, 2)],
    ids=["nobody is asked before the timeout", "two unanswered calls", "all answer"],
)
def test_a_rank_that_answers_is_not_lost_however_long_this_one_works(
    peers: Peers, timeout_s: float, num_calls: int, codes: list[int]
) -> None:
    with guard(peers, waits(timeout_s=timeout_s), PHASE, report=lambda error: pytest.fail(str(error))):
        time.sleep(0.4)
    assert peers.num_calls >= num_calls
    assert (peers.num_calls > 0) == (num_calls > 0)
    assert codes == []


def test_a_main_thread_that_comes_back_reports_by_itself(codes: list[int]) -> None:
    with pytest.raises(KeyError), guard(Peers(alarmed=True), waits(), PHASE, report=lambda _: None):
        raise KeyError("row")
    time.sleep(0.3)
    assert codes == []


def test_ranks_on_cpus_have_no_watchdog(codes: list[int]) -> None:
    with guard(Peers(alarmed=True), None, PHASE, report=lambda _: None):
        time.sleep(0.2)
    assert codes == []


STUCK = """
import ctypes
from llama_ssp.ranks.failures import guard
from tests.unit.ranks.test_guard import PHASE, Peers, waits
with guard(Peers(), waits(), PHASE, report=print):
    ctypes.CDLL(None).sleep(60)
"""


def test_no_library_call_outlives_the_watchdog() -> None:
    ended = subprocess.run(
        [sys.executable, "-u", "-c", STUCK], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ended.stdout.strip() == SENTENCE.format("no answer within timeouts.decode_s=0.2"), ended.stderr
    assert ended.returncode == 1

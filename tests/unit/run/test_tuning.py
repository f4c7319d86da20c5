"""The choice that a run folder keeps for when a run with overlapped rounds is resumed."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.errors import ConfigError
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.tuning import measure_pieces, tune
from llama_ssp.speculate.engine.adaptive import FixedLength
from llama_ssp.speculate.engine.overlap import OverlappedRound


def waits(text: str) -> bool | None:
    """What a decoder with overlapped rounds takes from the file of a run folder."""
    decoder: Any = SimpleNamespace(round=object.__new__(OverlappedRound), length=FixedLength(4))
    decoder.round.waits, folder = None, SimpleNamespace(read_kept={"overlap.json": text}.get)
    config = load("tiny", "tiny-draft").config
    tune(decoder, config, comm=Comm.single(), num_slots=64, folder=folder)  # type: ignore[arg-type]
    found: bool | None = decoder.round.waits
    return found


def test_the_kept_choice_is_read_back() -> None:
    assert waits('{"waits": true, "draft_s": 0.1, "forward_s": 0.2}') is True
    assert waits('{"waits": false}') is False


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"waits": 1}'])
def test_a_damaged_choice_is_an_error_that_says_what_to_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"overlap\.json of run_dir is damaged: delete it to measure again"):
        waits(text)


class TimedDecoder:
    """A draft's rank, whose rounds take 20 ms, and 9 ms more with a block before them.

    The first rounds are slow, and so is one of the others. The machine becomes slower by `drift` with each round.
    """

    def __init__(self, drift: float = 0.0) -> None:
        self.length, self.round, self.worked_s = FixedLength(4), self, 0.0
        self.drafts_here = True
        self._drift = drift
        self._num_rounds = 0

    def time_rounds(self, choices: list[object], *, num_slots: int, refills: bool) -> list[float]:
        assert num_slots == 64
        seconds = []
        for _ in choices:
            self._num_rounds += 1
            is_slow = self._num_rounds < 6 or self._num_rounds == 13
            factor = 1 + self._drift * self._num_rounds
            self.worked_s = factor * (0.027 if refills else 0.018)
            seconds.append(1.0 if is_slow else factor * (0.029 if refills else 0.02))
        return seconds


class TwoRanks:
    """Beside it a target whose forward takes 15 ms."""

    @staticmethod
    def gather_text(text: str) -> list[str]:
        return [json.dumps([False, 0.015]), text]


def test_what_precedes_a_round_of_rows_that_wait_is_measured_whole() -> None:
    found = measure_pieces(TimedDecoder(), comm=TwoRanks(), num_slots=64)  # type: ignore[arg-type]
    measured = (found.draft_s, found.forward_s, found.exchange_s, found.refill_s)
    assert measured == pytest.approx((0.018, 0.015, 0.002, 0.009))


@pytest.mark.parametrize("drift", [-0.02, 0.1])
def test_a_machine_that_changes_its_speed_does_not_change_what_a_block_takes(drift: float) -> None:
    found = measure_pieces(TimedDecoder(drift), comm=TwoRanks(), num_slots=64)  # type: ignore[arg-type]
    assert found.refill_s / found.draft_s == pytest.approx(0.5, rel=0.25)

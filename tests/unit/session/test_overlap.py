"""The choice that a run folder keeps for when a run with overlapped rounds is resumed."""

import json

import pytest

from llama_ssp.engine.draft_length import FixedLength
from llama_ssp.errors import ConfigError
from llama_ssp.session.draft_length import _measured_pieces, _waits


def test_the_kept_choice_is_read_back() -> None:
    assert _waits('{"waits": true, "draft_s": 0.1, "forward_s": 0.2}')
    assert not _waits('{"waits": false}')


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"waits": 1}'])
def test_a_damaged_choice_is_an_error_that_says_what_to_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"overlap\.json of run_dir is damaged: delete it to measure again"):
        _waits(text)


class TimedDecoder:
    """A draft's rank, whose rounds take 20 ms, and 9 ms more with a block before them."""

    def __init__(self) -> None:
        self.length, self.executor, self.worked_s = FixedLength(4), self, 0.0
        self.drafts_here = True

    def time_rounds(self, choices: list[object], *, num_slots: int, refills: bool) -> list[float]:
        assert num_slots == 64
        self.worked_s = (0.027 if refills else 0.018) * len(choices)
        return [0.029 if refills else 0.02] * (len(choices) - 1) + [1.0]


class TwoRanks:
    """Beside it a target whose forward takes 15 ms."""

    @staticmethod
    def gather_text(text: str) -> list[str]:
        return [json.dumps([False, 0.015]), text]


def test_what_precedes_a_round_of_rows_that_wait_is_measured_whole() -> None:
    found = _measured_pieces(TimedDecoder(), comm=TwoRanks(), num_slots=64)  # type: ignore[arg-type]
    assert found == pytest.approx({"draft_s": 0.018, "forward_s": 0.015, "exchange_s": 0.002, "refill_s": 0.009})

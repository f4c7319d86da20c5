"""The costs by which a run chooses K, measured with planted times."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.tuning import tune
from llama_ssp.settings.schema import ADAPTIVE, ADAPTIVE_LENGTHS, SpeculationConfig
from llama_ssp.speculate.engine.round import DraftChoice

CHUNK_S = 1.0


class TimedRounds:
    """Stands for a decoder whose rounds take planted times: a plain one 1 s, others by K and by the measurement."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.round, self.length = SimpleNamespace(drafters=[object()]), None
        self.seconds, self.timed = seconds, list[list[int]]()

    def time_rounds(self, choices: Sequence[DraftChoice], *, num_slots: int) -> list[float]:  # noqa: ARG002
        """The planted times, and those to read a chunk that was skipped."""
        self.timed.append([choice.num_tokens for choice in choices])
        return [
            self.seconds(each.num_tokens, len(self.timed)) + CHUNK_S * (each.num_unread > 2) if each.num_tokens else 1.0
            for each in choices
        ]


def tuned(seconds: Callable[[int, int], float]) -> tuple[Any, list[list[int]]]:
    """What chooses K after the measurement, and the lengths that each measurement has timed."""
    config = load("tiny", "tiny-draft").config
    speculation = SpeculationConfig(num_draft_tokens=ADAPTIVE, acceptance=0.8)
    decoder: Any = TimedRounds(seconds)
    tune(decoder, replace(config, speculation=speculation), comm=Comm.single(), num_slots=64)
    return decoder.length, decoder.timed


@pytest.mark.parametrize(("of_a_token", "left"), [(0.3, [0, *ADAPTIVE_LENGTHS, 1, 0]), (1.1, [0, 0])])
def test_drafts_that_lose_whatever_is_accepted_are_timed_twice_only(of_a_token: float, left: list[int]) -> None:
    """As in a large batch, where each drafted token costs a plain one and a draft step."""
    length, timed = tuned(lambda number, _: 1 + of_a_token * number)
    assert timed[3] == [0, *ADAPTIVE_LENGTHS, 1, 0]
    assert timed[4] == timed[-1] == left
    assert bool(length.choose([0]).num_tokens) is (of_a_token < 1)


def test_long_drafts_that_others_slowed_down_do_not_make_short_ones_cheap() -> None:
    """A round with one drafted token takes 1.9 s and adds 1.8 tokens; a line through all has it at less."""
    length, _ = tuned(lambda number, _: (1 + 0.9 * number) * (2.0 if number == max(ADAPTIVE_LENGTHS) else 1.0))
    assert length.choose([0]) == DraftChoice(0)

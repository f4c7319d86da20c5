"""Signals during decoding set a wish and nothing else, from the first one until the process ends."""

import signal
from collections.abc import Iterator

import pytest

from llama_ssp.decoding.loop import StopWish
from llama_ssp.tasks.stopping import heeding_signals

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_does_not_disturb_what_is_written_after_the_last_round(number: signal.Signals) -> None:
    wish = StopWish()
    with heeding_signals(wish, tell=lambda: None):
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert wish.requested
    signal.raise_signal(number)


def test_without_a_signal_the_old_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with heeding_signals(StopWish(), tell=lambda: None):
        pass
    assert [signal.getsignal(number) for number in NUMBERS] == before

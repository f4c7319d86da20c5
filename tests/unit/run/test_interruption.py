"""Signals during decoding set a wish and nothing else, from the first one until the process ends."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from llama_ssp.errors import InterruptedRun
from llama_ssp.ranks.process import signals_kept
from llama_ssp.run.interruption import interruptible, stopping_on_signals
from llama_ssp.speculate.engine.completion import StopRequest

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with signals_kept():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
        yield


def alone(wishes: bool) -> bool:
    return wishes


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_does_not_disturb_what_is_written_and_the_first_ends_a_wait_for_input(
    number: signal.Signals,
) -> None:
    stop_request = StopRequest()
    with contextlib.suppress(InterruptedRun), stopping_on_signals(stop_request, tell=lambda: None, agree=alone):
        heeding = handlers()
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(number)
        assert (handlers(), stop_request.requested) == (heeding, False)
        signal.raise_signal(number)
        signal.raise_signal(number)
        raise InterruptedRun("after the round")
    assert stop_request.requested
    signal.raise_signal(number)


@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
def test_a_wish_that_came_in_the_last_round_is_known_to_all_afterwards(here: bool) -> None:
    stop_request = StopRequest()
    with stopping_on_signals(stop_request, tell=lambda: None, agree=lambda _: True):
        if here:
            signal.raise_signal(signal.SIGTERM)
    assert stop_request.requested
    signal.raise_signal(signal.SIGTERM)


def test_a_wish_that_comes_behind_the_agreement_ends_what_follows_by_the_old_handlers() -> None:
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler)

    def agree(wishes: bool) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return wishes

    with pytest.raises(KeyboardInterrupt), stopping_on_signals(StopRequest(), tell=lambda: None, agree=agree):
        pass
    assert handlers() == [signal.default_int_handler] * 4


def test_a_hangup_that_is_ignored_on_purpose_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_request = StopRequest()
    with stopping_on_signals(stop_request, tell=lambda: None, agree=alone):
        signal.raise_signal(signal.SIGHUP)
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    assert not stop_request.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

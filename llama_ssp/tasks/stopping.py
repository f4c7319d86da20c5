"""Signals that ask a run to end: they set a wish, and the loop ends after the current round on every rank alike."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from llama_ssp.decoding.loop import StopWish

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def heeding_signals(wish: StopWish, *, tell: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGUSR1 set `wish` while the block runs, however often they come.

    The signal may have reached this rank alone, and not the one whose wish counts: `tell` passes it on to all.

    Once it is set they go on doing nothing else: SLURM and torchrun both pass a SIGTERM on, and the second one must not
    end a process that is writing its last records.
    """

    def note(_number: int, _frame: FrameType | None) -> None:
        if not wish.requested:
            wish.requested = True
            tell()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        if not wish.requested:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt again while the block waits for the user's input."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

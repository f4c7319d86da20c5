"""Passes the signals that stop a run on to its ranks, from the process that has started them.

The ranks lead sessions of their own, so Ctrl-C and a terminal that hangs up reach this process alone. Does not import
torch: a signal can come while that is imported.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from llama_ssp.errors import InterruptedRun
from llama_ssp.ranks.signals import heeded_signals
from llama_ssp.terminal.unread import complain

_LOOK_EVERY_S = 0.01


class SignalRelay:
    """Takes the signals of this process, from now on.

    They are blocked in every thread that starts later, and in the ranks until these can answer them.

    Attributes:
        has_relayed: whether a signal has been passed on.
    """

    def __init__(self) -> None:
        self.has_relayed = False
        self._signals = heeded_signals()
        self._list_ranks: Callable[[], Sequence[int | None]] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        Thread(target=self._relay, daemon=True, name="relay").start()

    def lead_to(self, list_ranks: Callable[[], Sequence[int | None]]) -> None:
        """Pass signals on, from now on, to the ranks that this function lists, once all of them have a process id."""
        self._list_ranks = list_ranks

    def _relay(self) -> None:
        while True:
            number = signal.sigwait(self._signals)
            if self._list_ranks is None:
                complain("interrupted")
                os._exit(InterruptedRun.exit_code)
            self.has_relayed = True
            while not (ranks := self._list_ranks()) or None in ranks:
                time.sleep(_LOOK_EVERY_S)
            for rank in filter(None, ranks):
                with suppress(ProcessLookupError):
                    os.kill(rank, number)

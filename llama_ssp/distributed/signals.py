"""The signals that stop a run, and the end of the torchrun agent, which also stops it.

Does not import torch, so that a launcher can use it. Modules `session.stopping` and `faults` handle the signals.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Thread
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_LOOK_EVERY_S = 0.2


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this process handles: `STOP_SIGNALS`, without SIGHUP if that is ignored.

    A process started by `nohup` ignores SIGHUP, to outlive its terminal. Other signals are handled even if they were
    ignored at the start: torchrun has to ignore SIGUSR1, and its ranks inherit that.
    """
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignores_hangup and number is signal.SIGHUP))


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Call `handler` on the signals that this process handles, from now on."""
    for number in heeded_signals():
        signal.signal(number, handler)


def ignore_signals() -> None:
    """Do nothing on the signals that this process handles, from now on.

    By a function: if a signal has come while SIG_IGN is set, Python prints that it "ignored it due to race condition".
    """
    handle_signals(_do_nothing)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The torchrun process that started this rank.

    Attributes:
        holds_store: it, or the first node's agent, holds the rendezvous store; otherwise rank 0 does.
    """

    pid: int
    holds_store: bool

    @property
    def is_gone(self) -> bool:
        """Whether it has ended; it ends before its ranks only if it is killed."""
        return os.getppid() != self.pid

    def heed_end(self) -> None:
        """Send this process a SIGTERM when the agent has ended.

        A thread polls the parent's id, because PR_SET_PDEATHSIG would follow the agent's thread, not its process.
        """
        Thread(target=self._wait, daemon=True, name="agent").start()

    def _wait(self) -> None:
        while not self.is_gone:
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)


@cache
def find_agent() -> Agent | None:
    """Return the agent that started this process; None in plain python and under srun, where a parent may end.

    Call it early: the first call stores the parent's id.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return Agent(pid=os.getppid(), holds_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")

"""The signals that ask a run to stop, and the end of a torchrun agent, which asks for the same.

Apart from `session.stopping` and `faults`, which say what a signal does, so that a launcher can use it without torch.
"""

import os
import signal
import time
from dataclasses import dataclass
from functools import cache
from threading import Thread

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_LOOK_EVERY_S = 0.2


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this process heeds: `STOP_SIGNALS`, without a SIGHUP that is ignored.

    A process that `nohup` has started ignores SIGHUP, since it is to outlive its terminal. The other signals are
    heeded even if they were ignored at the start: torchrun has to ignore SIGUSR1, and its ranks inherit that.
    """
    is_for_life = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_for_life and number is signal.SIGHUP))


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The torchrun process that started this rank.

    Attributes:
        pid: its process id.
        holds_store: whether it, or the first node's agent, holds the store in which ranks meet; else rank 0 does.
    """

    pid: int
    holds_store: bool

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, which it never does before its ranks unless it is killed."""
        return os.getppid() != self.pid

    def heed_end(self) -> None:
        """Send this process a SIGTERM when the agent has ended.

        A thread asks for the parent's id, because PR_SET_PDEATHSIG would follow the agent's thread, not the agent.
        """
        Thread(target=self._wait, daemon=True, name="agent").start()

    def _wait(self) -> None:
        while not self.is_gone:
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)


@cache
def find_agent() -> Agent | None:
    """Return the agent that started this process; None in plain python and under srun, where parents may go.

    The first call notes the parent, and so has to come early.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return Agent(pid=os.getppid(), holds_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")

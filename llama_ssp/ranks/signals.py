"""The signals that stop a run, and the end of the torchrun agent, which also stops it.

Does not import torch, so that a launcher can use it. Modules `run.interruption` and `failures` handle the signals.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
AGENT = "LLAMA_SSP_AGENT"
"""Environment variable: the process id of the agent, where it is that of `llama-ssp run`."""
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
    handle_signals(lambda _number, _frame: None)


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

        def wait() -> None:
            while not self.is_gone:
                time.sleep(_LOOK_EVERY_S)
            os.kill(os.getpid(), signal.SIGTERM)

        Thread(target=wait, daemon=True, name="agent").start()


@cache
def find_agent() -> Agent | None:
    """Return the agent that started this process; None in plain python and under srun, where a parent may end."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # torchrun does not name itself. It starts each rank in a session of its own, unless a script stands between,
    # and has loaded torch, which no process has that adopts orphans.
    parent = os.getppid()
    is_adopted = os.getsid(0) == os.getpid() and not _has_torch(parent)
    pid = int(os.environ.get(AGENT) or (0 if is_adopted else parent))
    return Agent(pid=pid, holds_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _has_torch(pid: int) -> bool:
    """Whether a process of this user has loaded torch; if the system does not tell, whether it is a Python at all."""
    process, own = Path(f"/proc/{pid}"), Path("/proc/self")
    try:
        return process.stat().st_uid == own.stat().st_uid and b"/libtorch" in (process / "maps").read_bytes()
    except PermissionError:
        return b"python" in (process / "cmdline").read_bytes()
    except OSError:  # it has ended, or is hidden
        return not own.exists()

"""A rank as a process: its number by the environment of torchrun or SLURM, where it may listen, and what stops it.

The ranks of one machine listen on its loopback. Between several machines whoever reaches a port can take part in the
run, so their network has to be trusted. The end of the torchrun agent stops a run as signals do; `run.interruption` and
`failures` handle them. Does not import torch, so that a launcher can use it.
"""

import atexit
import errno
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from threading import Thread
from types import FrameType

from llama_ssp.errors import ConfigError

LOOPBACK = "127.0.0.1"
# What gloo and NCCL call the interface; "=" asks NCCL for exactly this name.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


_COUNTS = re.compile(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*")
_WHO_SETS_IT = "; torchrun or srun sets it: unset it to run alone"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank and size, in the world and on this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def check_docstrings() -> None:
    """Raise ConfigError if Python has removed docstrings: transformers makes its models with the help of theirs."""
    if sys.flags.optimize > 1:
        raise ConfigError(
            "Python removes docstrings (PYTHONOPTIMIZE=2, or python -OO), and transformers has no models without them: "
            "leave it out, or use PYTHONOPTIMIZE=1"
        )


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's variables, else from a SLURM step's; by default a single rank.

    A batch script outside a step also has SLURM_PROCID; only a step has SLURM_STEP_ID. Raises ConfigError for variables
    that are no such numbers.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return Ranks(rank=0, size=1, local_rank=0, local_size=1)
    rank, size = number_in(environ, names[0]), number_in(environ, names[1])
    if rank >= size:
        raise ConfigError(f"{names[0]}={rank} must be below {names[1]}={size}{_WHO_SETS_IT}")
    local_rank = number_in(environ, names[2], default=rank)
    if _COUNTS.fullmatch(counts := environ.get(names[3], str(size))) is None:
        raise ConfigError(f"{names[3]}={counts} is not a number of ranks for each node{_WHO_SETS_IT}")
    local_size = _of_node(counts, node=number_in(environ, "SLURM_NODEID", default=0))
    return Ranks(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def number_in(environ: Mapping[str, str], name: str, *, default: int = 0) -> int:
    """Return the number in a variable of torchrun's or SLURM's; ConfigError if it holds something else."""
    given = environ.get(name, str(default))
    if not (given.isascii() and given.isdigit()):
        raise ConfigError(f"{name}={given} is not a whole number from 0 on{_WHO_SETS_IT}")
    return int(given)


def launcher_of(environ: Mapping[str, str]) -> str | None:
    """Name what started this process as a rank; None if nothing did. A shell in a step of one task is no rank."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    return "srun" if read_ranks(environ).size > 1 else None


def _of_node(counts: str, *, node: int) -> int:
    """A node's number of tasks: SLURM writes "4(x2),3" for four on each of two nodes and three on the last one."""
    number = ""
    for of_nodes in counts.split(","):
        number, _, repeated = of_nodes.partition("(x")
        node -= int(repeated.rstrip(")") or 1)
        if node < 0:
            break
    return int(number)


def are_all_here(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine; without LOCAL_WORLD_SIZE, RANK and WORLD_SIZE do not say."""
    if "RANK" in environ and "LOCAL_WORLD_SIZE" not in environ:
        return False
    ranks = read_ranks(environ)
    return ranks.local_size == ranks.size


def meeting_host(environ: Mapping[str, str]) -> str:
    """The host of rank 0: the loopback if all ranks are here, else as torchrun says, or a SLURM step's first node."""
    if are_all_here(environ):
        return LOOPBACK
    return environ.get("MASTER_ADDR") or environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")


def stay_on_loopback() -> None:
    """Let gloo and NCCL connect over the loopback, if all ranks are here and the user has chosen no interface."""
    if are_all_here(os.environ):
        for name, interface in _INTERFACES.items():
            os.environ.setdefault(name, interface)


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a socket for connections to `host`, which is this machine.

    An address is bound alone. A name, or the address of a router that leads here, may mean any interface.
    """
    try:
        family = socket.AF_INET6 if isinstance(ip_address(host), IPv6Address) else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
    except ValueError:
        pass
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
AGENT = "LLAMA_SSP_AGENT"
"""Environment variable: the process id of the agent, if `llama-ssp run` started it."""
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


@contextmanager
def signals_kept() -> Iterator[None]:
    """Let `STOP_SIGNALS` do after the block what they did before it."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def at_exit(function: Callable[[], object]) -> None:
    """Call a function when this process ends, and not when one ends that has forked from it."""
    pid = os.getpid()
    atexit.register(lambda: os.getpid() == pid and function())


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

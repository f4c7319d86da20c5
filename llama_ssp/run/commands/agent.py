"""Starts ranks on this machine by torchrun's API, on the loopback, and finds the exit code of their run.

torchrun itself listens on all interfaces, reports every failure as 1 with a traceback, and dies by SIGUSR1. Tests hold
what differs here (tests/distributed/test_own_ranks.py, test_everyday.py):

    rendezvous   a store on the loopback, without the pickled state of torchrun's
    signals      the first one goes to every rank, of later ones each Ctrl-C; ranks answer it once they can
    exit code    the run's; a rank whose loss no rank has reported is named
"""

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from llama_ssp.errors import InterruptedRun, LostRankError
from llama_ssp.ranks.process import AGENT, LOOPBACK, handle_signals, heeded_signals, ignore_signals
from llama_ssp.ranks.rendezvous import hold_store
from llama_ssp.terminal.unread import complain

_BACKEND = "loopback"
_RUN_ID = "none"  # names no run folder: each run has the time of its start
_STORE_S = 60
_END_S = "86400"  # ranks end their round and write their records, however long that takes


class _Loopback(StaticTCPRendezvous):
    """Rendezvous of a single agent, which holds the store of its ranks. torch's own listens on all interfaces."""

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        handle_signals(_stop)  # until here there is no rank
        store = hold_store(LOOPBACK, 0, size=self.world_size, timeout_s=_STORE_S)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))


def _stop(number: int, _frame: object) -> None:
    """Let torch pass the signal on to the ranks, which lead sessions of their own."""
    ignore_signals()
    signal.signal(signal.SIGINT, _pass_on)
    raise SignalException(f"process {os.getpid()} got signal {number}", sigval=signal.Signals(number))


def _pass_on(number: int, _frame: object) -> None:
    """Send the ranks, which are the children of this process, another signal."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one has ended meanwhile
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.kill(int(file.parent.name), number)


def run_ranks(command: Sequence[str], *, num_ranks: int, if_lost: str) -> int:
    """Run a command as every rank, to the end of the last one; returns the exit code of the run.

    `if_lost` is what its user does if a rank is lost.
    """
    logging.disable(logging.CRITICAL)  # the agent's own words
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as under torchrun: each rank sets its number of threads itself
    os.environ |= {AGENT: str(os.getpid()), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _END_S}
    # Ranks inherit the blocked signals, which wait until a rank can answer them; this thread gets the agent's signals.
    Thread(target=Event().wait, daemon=True, name="signals").start()
    signal.pthread_sigmask(signal.SIG_BLOCK, heeded_signals())
    rendezvous_handler_registry.register(_BACKEND, lambda _: _Loopback(LOOPBACK, 0, 0, num_ranks, _RUN_ID, _STORE_S))
    program, *words = command
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=_RUN_ID,
            rdzv_backend=_BACKEND,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            signals_to_handle="SIGQUIT",
        ),
        program,
    )
    try:
        launch(*(word.replace("$", "$$") for word in words))  # the agent fills in ${local_rank}
    except SignalException:
        return InterruptedRun.exit_code
    except ChildFailedError as error:
        return exit_code_of(error.failures, if_lost=if_lost)
    except (OSError, RuntimeError) as error:
        complain(f"{num_ranks} ranks could not be started: {str(error).strip().partition(chr(10))[0]}")
        return LostRankError.exit_code
    return 0


def exit_code_of(failures: Mapping[int, ProcessFailure], *, if_lost: str = LostRankError.remedy) -> int:
    """Return the exit code of the lowest rank that has one, after naming a rank whose loss no rank has reported.

    The agent ends all ranks when one has ended, so ranks that wait for a killed one may only say `interrupted`.
    """
    codes = [failures[rank].exitcode for rank in sorted(failures) if failures[rank].exitcode > 0]
    killed = [rank for rank in sorted(failures) if failures[rank].exitcode < 0]
    if killed and LostRankError.exit_code not in codes:
        name = signal.Signals(-failures[killed[0]].exitcode).name
        reason = " (the kernel does that when memory is exhausted)" if name == "SIGKILL" else ""
        complain(f"rank {killed[0]} was ended by {name}{reason}; {if_lost}")
        return LostRankError.exit_code
    return codes[0]

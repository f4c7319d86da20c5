"""Starts ranks on this machine by torch's elastic agent, as torchrun does, and finds the exit code of their run.

torchrun itself reports every failure as 1, with a traceback of its own. Here the ranks alone speak.
"""

import logging
import os
import signal
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from llama_ssp.errors import InterruptedRun, LostRankError
from llama_ssp.ranks.process import AGENT, LOOPBACK
from llama_ssp.ranks.rendezvous import hold_store
from llama_ssp.run.commands.own_ranks import SignalRelay
from llama_ssp.terminal.unread import complain

_STORE_S = 60
_RUN_ID = "none"  # names no run folder: each run has the time of its start


class _Loopback(StaticTCPRendezvous):
    """The only agent meets nobody, and holds the store of its ranks. torch's own would listen on all interfaces."""

    def next_rendezvous(self) -> RendezvousInfo:
        store = hold_store(LOOPBACK, 0, size=self.world_size, timeout_s=_STORE_S)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))


def run_ranks(command: Sequence[str], *, num_ranks: int, relay: SignalRelay) -> int:
    """Run a command as every rank, to the end of the last one; returns the exit code of the run."""
    logging.disable(logging.CRITICAL)  # the agent's own words
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as under torchrun: each rank sets its number of threads itself
    os.environ[AGENT] = str(os.getpid())
    # The relay takes the others, and a SIGHUP that nohup ignores stays ignored.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    program, *words = command
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=program,
        args=tuple(word.replace("$", "$$") for word in words),  # the agent fills in ${local_rank}
        rdzv_handler=_Loopback(LOOPBACK, 0, 0, num_ranks, _RUN_ID, _STORE_S),
        max_restarts=0,
        monitor_interval=0.1,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))
    relay.list_ranks = lambda: [worker.id for worker in agent.get_worker_group().workers]
    try:
        failures = agent.run().failures
    except SignalException:  # SIGQUIT, which asks no rank to finish anything
        return InterruptedRun.exit_code
    except (OSError, RuntimeError) as error:
        complain(f"{num_ranks} ranks could not be started: {str(error).strip().partition(chr(10))[0]}")
        return LostRankError.exit_code
    return exit_code_of(failures, was_stopped=relay.has_relayed)


def exit_code_of(failures: Mapping[int, ProcessFailure], *, was_stopped: bool) -> int:
    """Return the exit code of the lowest rank that has one, after naming a rank whose loss no rank has reported.

    The agent ends all ranks when one has ended, so those that wait for a killed one may only say `interrupted`.
    """
    codes = [failures[rank].exitcode for rank in sorted(failures) if failures[rank].exitcode > 0]
    killed = [rank for rank in sorted(failures) if failures[rank].exitcode < 0]
    if killed and not was_stopped and LostRankError.exit_code not in codes:
        name = signal.Signals(-failures[killed[0]].exitcode).name
        reason = " (the kernel does that when memory is exhausted)" if name == "SIGKILL" else ""
        complain(f"rank {killed[0]} was ended by {name}{reason}; run the same command with the same run_dir to resume")
        return LostRankError.exit_code
    if codes:
        return codes[0]
    return LostRankError.exit_code if failures else 0

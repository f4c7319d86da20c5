"""Rounds as captured graphs: the sequences of `rounds` recorded once, then replayed without the host in between.

A round is at most two graphs, so that events between them can take the time: all steps of the draft with their draws,
then the target's forward with the rule, the commit and the collectives. There is one of each for every width of the
cache. Prefill is not captured.

    rounds at a width   1st: operators from Python   2nd: recorded, then replayed   3rd, 4th, ...: replayed

The first round is the warm-up: it makes what is made lazily (communicators, compiled kernels, workspaces). Recording
computes nothing, so that a round takes place once, however it is run. A graph reads and writes the addresses that were
there when it was recorded: all that a round reads keeps its place, and where something was made anew, all graphs go.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from llama_ssp.drafting.broadcast import AgreedRule
from llama_ssp.drafting.protocol import Drafter
from llama_ssp.engine.clock import Clock
from llama_ssp.engine.round import Rounds
from llama_ssp.engine.state import BatchState
from llama_ssp.models.runner import Runner

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records operators without running them."""

    def record(self, piece: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """Record all that `piece` launches.

        Returns:
            What `piece` returned, in tensors that every replay overwrites, and the replay.

        Raises:
            RuntimeError: something in it cannot be recorded.
        """
        ...

    def forget(self) -> None:
        """All replays are about to be dropped."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory, which holds because they never run at the same time."""

    def __init__(self) -> None:
        self.forget()

    def record(self, piece: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """See `Recorder`."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Threads of the communication library look at events of their own meanwhile: only this thread is watched.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = piece()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # ending a capture that failed raises before torch would do so
            raise
        return outputs, graph.replay

    def forget(self) -> None:
        """Wait for those that are under way, and begin a new pool; see `Recorder`."""
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()


class Graphs:
    """The graphs of one batch's rounds.

    Args:
        recorder: makes them.

    Attributes:
        failed: recording has failed once; since then everything is launched from Python.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.failed = False
        self._recorder = recorder
        self._state: BatchState | None = None
        self._allocations: tuple[int, ...] = ()
        self._forget()

    def begin(self, state: BatchState, *, bucket: int, allocations: tuple[int, ...]) -> None:
        """Say which round comes now; graphs of another batch or of other caches are dropped.

        Args:
            state: the batch.
            bucket: width of the cache.
            allocations: how often each cache has been made anew.
        """
        if state is not self._state or allocations != self._allocations:
            self._forget()
            self._state, self._allocations = state, allocations
        self._bucket = bucket
        self._is_first = bucket not in self._met
        self._met.add(bucket)

    def run(self, part: str, piece: Callable[[], _T]) -> _T:
        """Do a part of this round.

        Args:
            part: its name.
            piece: does it, reading and writing tensors that stay where they are; parts before it in this round may be
                among them.
        """
        if self._is_first or self.failed:
            return piece()
        key = part, self._bucket
        if key not in self._kept:
            try:
                self._kept[key] = self._recorder.record(piece)
            except RuntimeError as error:
                self._give_up(part, error)
                return piece()
        outputs, replay = self._kept[key]
        replay()
        return outputs  # type: ignore[no-any-return]  # what this very part returned

    def _give_up(self, part: str, error: RuntimeError) -> None:
        reason = str(error).strip().partition("\n")[0]
        _log.warning("rounds go on without CUDA graphs: %s could not be captured: %s", part, reason)
        self.failed = True
        self._forget()

    def _forget(self) -> None:
        self._recorder.forget()
        self._kept: dict[tuple[str, int], tuple[Any, Callable[[], None]]] = {}
        self._met: set[int] = set()


class CapturedRounds(Rounds):
    """Rounds that are replayed as graphs; see `Rounds` for the rest.

    Args:
        target: see `Rounds`.
        drafter: see `Rounds`.
        rule: see `Rounds`.
        clock: see `Rounds`.
        recorder: makes the graphs.
    """

    keeps_state = True

    def __init__(
        self, target: Runner, drafter: Drafter | None, *, rule: AgreedRule, clock: Clock, recorder: Recorder
    ) -> None:
        super().__init__(target, drafter, rule=rule, clock=clock)
        self.graphs = Graphs(recorder)

    def advance(self, state: BatchState, *, bucket: int) -> Tensor:
        """See `Rounds.advance`; the result is overwritten by the next round on the same stream."""
        made = self.target.num_allocations, self.drafter.num_allocations if self.drafter else 0
        self.graphs.begin(state, bucket=bucket, allocations=made)
        self.clock.start()
        opening = None
        if self.drafter:
            opening = self.graphs.run("draft", partial(self.open, state, bucket=bucket))
            self.clock.lap("draft")
        result = self.graphs.run("verify", partial(self.close, state, opening, bucket=bucket))
        self.clock.lap("verify")
        return result

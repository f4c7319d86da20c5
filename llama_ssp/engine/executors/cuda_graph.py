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

from llama_ssp.engine.round import Block, Round
from llama_ssp.engine.state import BatchState

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

    def run(
        self, part: str, piece: Callable[[], _T], state: BatchState, *, bucket: int, allocations: tuple[int, ...]
    ) -> _T:
        """Run a piece of a round: from Python at first, then captured, then replayed.

        Graphs of another batch or of other caches are dropped.

        Args:
            part: its name.
            piece: runs it, reading and writing tensors that stay where they are; earlier pieces of the same round may
                be among them.
            state: the batch.
            bucket: width of the cache.
            allocations: how often each cache has been made again.
        """
        if state is not self._state or allocations != self._allocations:
            self._forget()
            self._state, self._allocations = state, allocations
        key = part, bucket
        if self.failed or key not in self._met:
            self._met.add(key)
            return piece()
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
        self._met: set[tuple[str, int]] = set()


class CudaGraphExecutor:
    """Replays the pieces of a round as graphs; see `Executor`.

    The result of a round is overwritten by the next round on the same stream.

    Args:
        round_: the round whose pieces are captured.
        recorder: makes the graphs.
    """

    keeps_state = True

    def __init__(self, round_: Round, *, recorder: Recorder) -> None:
        self._round = round_
        self.graphs = Graphs(recorder)

    def draft(self, state: BatchState, *, bucket: int) -> Block:
        """See `Executor.draft`."""
        piece = partial(self._round.draft, state, bucket=bucket)
        if self._round.drafter and self._round.drafter.on_host:
            return piece()
        return self._run("draft", piece, state, bucket=bucket)

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """See `Executor.verify`."""
        return self._run("verify", partial(self._round.verify, state, block, bucket=bucket), state, bucket=bucket)

    def _run(self, part: str, piece: Callable[[], _T], state: BatchState, *, bucket: int) -> _T:
        return self.graphs.run(part, piece, state, bucket=bucket, allocations=self._round.num_allocations)

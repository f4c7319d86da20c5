"""Runs rounds as CUDA graphs: captures the tensor operations of `round` once, then replays them without Python.

A round is at most two graphs, so that events between them can time the parts: one for all steps of the draft with their
draws, one for the target's forward with the rule, the commit and the collectives. Each bucket of the cache and each
choice of a draft has its own pair of graphs. Prefill is not captured. For rounds that overlap see `cuda_overlap`.

    rounds at a bucket   1st: run from Python   2nd: captured, then replayed   3rd, 4th, ...: replayed

The first round is the warm-up: it creates what is created lazily (communicators, compiled kernels, workspaces). Capture
computes nothing, so every round runs exactly once. A graph reads and writes the addresses of its capture: whatever a
round reads must stay in place. When a tensor is allocated again, all graphs are dropped.
"""

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from llama_ssp.distributed.gpu.capturing import capture_stream
from llama_ssp.distributed.gpu.device_errors import ends_run
from llama_ssp.engine.round import Block, DraftChoice, Round
from llama_ssp.engine.state import BatchState

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records operators without running them."""

    def record(self, piece: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """Record everything that `piece` launches; raises RuntimeError if an operator cannot be recorded.

        Returns the outputs of `piece`, in tensors that every replay overwrites, and the replay.
        """

    def forget(self) -> None:
        """Prepare for the end of all replays."""


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool, which is safe because they never run concurrently.

    Args:
        finish: waits until the device has done everything that was launched.
    """

    def __init__(self, *, finish: Callable[[], None] = torch.cuda.synchronize) -> None:
        self._finish = finish
        self.forget()

    def record(self, piece: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """See `Recorder`."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._finish()  # torch does so as well, but would wait for a lost rank without a limit
        try:
            # Threads of NCCL query their own events meanwhile, so only this thread's calls may invalidate the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=capture_stream(), capture_error_mode="thread_local"):
                outputs = piece()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # torch skips this when ending a failed capture raises
            raise
        return outputs, graph.replay

    def forget(self) -> None:
        """Wait for running replays, and begin a new pool; see `Recorder`."""
        self._finish()
        self._pool = torch.cuda.graph_pool_handle()


class Graphs:
    """The graphs of a round's pieces.

    Args:
        recorder: records the pieces.

    Attributes:
        failed: recording has failed once; since then everything runs from Python.
    """

    def __init__(self, round_: Round, recorder: Recorder) -> None:
        self.failed = False
        self._round = round_
        self._recorder = recorder
        self._state: BatchState | None = None
        self._allocations: tuple[int, ...] = ()
        self._forget()

    def run(self, key: tuple[str, *tuple[Hashable, ...]], piece: Callable[[], _T], state: BatchState) -> _T:
        """Run a piece of a round: the first time from Python, the second time captured, then replayed.

        Its tensors must stay in place. Graphs of another batch or of other allocations of the caches are dropped.

        Args:
            key: the part, and whatever decides its operators and the tensors that it reads.
            piece: launches its operators.
            state: the batch.
        """
        allocations = self._round.num_allocations
        if state is not self._state or allocations != self._allocations:
            self._forget()
            self._state, self._allocations = state, allocations
        if self.failed or key not in self._met:
            self._met.add(key)
            return piece()
        if key not in self._kept:
            try:
                self._kept[key] = self._recorder.record(piece)
            except RuntimeError as error:
                if ends_run(error):
                    raise
                reason = str(error).strip().partition("\n")[0]
                _log.warning("continuing without CUDA graphs: %s could not be captured: %s", key[0], reason)
                self.failed = True
                self._forget()
                return piece()
        outputs, replay = self._kept[key]
        replay()
        return outputs  # type: ignore[no-any-return]  # what this part returned when captured

    def _forget(self) -> None:
        self._recorder.forget()
        self._kept: dict[Hashable, tuple[Any, Callable[[], None]]] = {}
        self._met: set[Hashable] = set()


class CudaGraphExecutor:
    """Replays the pieces of a round as graphs; see `Executor`.

    The next round overwrites the result of a round, on the same stream.
    """

    keeps_state = True

    def __init__(self, round_: Round, *, recorder: Recorder) -> None:
        self._round = round_
        self._graphs = Graphs(round_, recorder)
        self._blocks: dict[tuple[DraftChoice, int], Block] = {}

    @property
    def failed(self) -> bool:
        """See `Graphs`."""
        return self._graphs.failed

    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """See `Executor.draft`."""
        piece = partial(self._round.draft, state, choice=choice, bucket=bucket)
        if self._round.drafters[choice.source].on_host:
            return self._in_place(piece(), bucket=bucket)
        return self._graphs.run(("draft", choice, bucket), piece, state)

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """See `Executor.verify`."""
        key = "verify", block.choice if block else None, bucket
        return self._graphs.run(key, partial(self._round.verify, state, block, bucket=bucket), state)

    def _in_place(self, block: Block, *, bucket: int) -> Block:
        """Copy a block that no graph wrote to where the graph of its verification reads it."""
        kept = self._blocks.setdefault((block.choice, bucket), block)
        for place, values in zip(kept[1:], block[1:], strict=True):
            if isinstance(place, Tensor) and isinstance(values, Tensor) and place is not values:
                place.copy_(values)
        return kept

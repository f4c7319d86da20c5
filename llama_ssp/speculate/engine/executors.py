"""How the stages of a round are run: as traces on CPUs, as CUDA graphs on GPUs, else from Python.

    a CPU    torch's interpreter replays a trace without Python (`tracing`). Each batch size and each choice of a draft
             has its own. A stage whose model may change its operators runs from Python, as do messages of overlapped
             rounds.
    a GPU    a stage is a graph, so that events between graphs can time the stages. Each bucket of the cache and each
             choice of a draft has its own. Prefill is not captured.

    rounds at a bucket   1st: run from Python   2nd: recorded, then replayed   3rd, 4th, ...: replayed

The first round is the warm-up: it creates what is created lazily (communicators, compiled kernels, workspaces). Capture
computes nothing, so every round runs exactly once. A graph reads and writes the addresses of its capture: whatever a
round reads must stay in place. When a tensor is allocated again, all graphs are dropped.

Shapes: R rows being prefilled, T tokens of the longest prompt, S slots.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import Runner, row_class
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.gpu.devices import capture_stream, ends_run
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.ngram import NgramDrafter
from llama_ssp.speculate.engine.round import EagerExecutor, Executor, Round, Stage
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.speculate.engine.tracing import Traced

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_STATE = len(BatchState._fields)
_MOST_TOKENS = 64
"""Of a prefill that is traced."""
_NUM_TIMED, _LONGEST_S = 2, 0.1


def make_executor(round_: Round, *, cuda_graphs: bool) -> Executor:
    """Choose by the device of the target; `cuda_graphs` says whether a GPU's rounds are captured."""
    if round_.target.device.type == "cpu":
        return TracedExecutor(round_)
    if not cuda_graphs:
        return EagerExecutor()
    return GraphExecutor(round_, recorder=CudaRecorder(finish=round_.verifier.comm.finish))


class TracedExecutor:
    """Runs the stages of a round in torch's interpreter; see `Executor`.

    Attributes:
        traced: by name of the stage.
    """

    keeps_state = False

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self.traced: dict[str, Traced[Any]] = {}

    def run(self, stage: Stage, state: BatchState, *tensors: Tensor) -> Any:  # noqa: ANN401 - what the stage returns
        """See `Executor`."""
        if stage.on_host or not stage.repeats:
            return stage.function(state, *tensors)
        if stage.name not in self.traced:
            self.traced[stage.name] = Traced(self._call, reads=stage.reads)
        self._stage = stage
        drafted = stage.choice if stage.name == "draft" else stage.choice.num_tokens
        key, version = (state.lengths_B.shape, drafted, len(tensors)), self._round.num_allocations
        return self.traced[stage.name](key, *state, *tensors, bucket=stage.bucket, version=version)

    def _call(self, *tensors: Tensor) -> Any:  # noqa: ANN401 - what the stage returns
        return self._stage.function(BatchState(*tensors[:_STATE]), *tensors[_STATE:])


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


class GraphExecutor:
    """Replays the stages of a round as graphs; see `Executor`.

    The next round overwrites the results of a round, on the same stream.

    Attributes:
        failed: recording has failed once; since then everything runs from Python.
    """

    keeps_state = True

    def __init__(self, round_: Round, *, recorder: Recorder) -> None:
        self.failed = False
        self._round = round_
        self._recorder = recorder
        self._state: BatchState | None = None
        self._allocations: tuple[int, ...] = ()
        self._results_of_host: dict[Hashable, tuple[Tensor, ...]] = {}
        self._forget()

    def run(self, stage: Stage, state: BatchState, *tensors: Tensor) -> Any:  # noqa: ANN401 - what the stage returns
        """Run a stage: the first time from Python, the second time captured, then replayed; see `Executor`.

        Graphs of another batch or of other allocations of the caches are dropped.
        """
        key, function = (stage.name, stage.choice, stage.bucket), partial(stage.function, state, *tensors)
        if stage.on_host:
            return self._in_place(key, function())
        allocations = self._round.num_allocations
        if state is not self._state or allocations != self._allocations:
            self._forget()
            self._state, self._allocations = state, allocations
        if self.failed or key not in self._met:
            self._met.add(key)
            return function()
        if key not in self._graphs:
            try:
                self._graphs[key] = self._recorder.record(function)
            except RuntimeError as error:
                if ends_run(error):
                    raise
                reason = str(error).strip().partition("\n")[0]
                _log.warning("continuing without CUDA graphs: %s could not be captured: %s", stage.name, reason)
                self.failed = True
                self._forget()
                return function()
        outputs, replay = self._graphs[key]
        replay()
        return outputs

    def _in_place(self, key: Hashable, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy what no graph has written to where the graph of the next stage reads it."""
        kept = self._results_of_host.setdefault(key, found)
        for place, values in zip(kept, found, strict=True):
            if place is not values:
                place.copy_(values)
        return kept

    def _forget(self) -> None:
        self._recorder.forget()
        self._graphs: dict[Hashable, tuple[Any, Callable[[], None]]] = {}
        self._met: set[Hashable] = set()


class TracedPrefill:
    """Runs the prefills of a round; those of short prompts in torch's interpreter. See `Round.prefill`.

    One trace serves prompts of all lengths whose operators are the same. Tracing reads the prompts once more, so it
    waits until there have been a few such prefills, and is left out where a prefill takes so long that Python hardly
    matters. It is for the library alone: a run would count the tracing in the time of one of its completions.

    Attributes:
        traced: the prefills of short prompts.
    """

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._allocations: tuple[int, ...] = ()
        self._timed: dict[Hashable, list[float]] = {}
        self.traced = Traced(self._read, reads=(round_.target, round_.drafters, round_.verifier))

    def __call__(
        self,
        prompts: BatchState,
        rows: Sequence[int],
        *,
        lengths: Sequence[int],
        buckets: Buckets,
        drafters: Sequence[Drafter] | None = None,
    ) -> Tensor:
        """See `Round.prefill`."""
        round_, longest = self._round, max(lengths)
        self._drafters = round_.drafters if drafters is None else drafters
        key = (
            len(rows), row_class(len(rows) * longest), prompts.num_slots,
            tuple(drafter in self._drafters for drafter in round_.drafters),
        )  # fmt: skip
        seconds, allocations = self._timed.setdefault(key, []), round_.num_allocations
        # The first forward after an allocation makes the caches, which a trace must find.
        is_first, self._allocations = allocations != self._allocations, allocations
        if is_first or len(seconds) < _NUM_TIMED or min(seconds) > _LONGEST_S or not self._is_short(rows, longest):
            started = time.perf_counter()
            result = round_.prefill(prompts, rows, lengths=lengths, buckets=buckets, drafters=drafters)
            seconds[_NUM_TIMED - 1 :] = [time.perf_counter() - started]
            return result
        self._rows, self._lengths, self._buckets = rows, lengths, buckets
        tokens_RT, rows_R = prompts.tokens_BS[:, :longest], to_device(rows, round_.target.device)
        return self.traced(
            key, tokens_RT, rows_R, *prompts, bucket=buckets.covering(longest), version=round_.num_allocations
        )

    def _is_short(self, rows: Sequence[int], longest: int) -> bool:
        """Whether a prefill is short enough, and calls the same operators whenever its key is the same."""
        if len(rows) * longest > _MOST_TOKENS or self._round.verifier.comm.size > 1:
            return False
        is_known = all(isinstance(drafter, ModelDrafter | NgramDrafter) for drafter in self._drafters)
        models = [drafter.runner for drafter in self._drafters if isinstance(drafter, ModelDrafter)]
        return is_known and all(map(_repeats, [self._round.target, *models]))

    def _read(self, tokens_RT: Tensor, rows_R: Tensor, *state: Tensor) -> Tensor:
        prompts, lengths = BatchState(*state), self._lengths
        to_read = Prompts(tokens_RT, prompts.lengths_B, lengths, longest=max(lengths), rows_R=rows_R)
        return self._round.read(prompts, to_read, self._rows, buckets=self._buckets, drafters=self._drafters)


def _repeats(runner: Runner) -> bool:
    return runner.repeats_operators and not runner.packs_prompts

"""Executors run the stages of a round: one of the device (`operators`), CUDA graphs, else Python.

    a GPU    a stage is a graph, so that events between graphs can time the stages. Each bucket of the cache and each
             choice of a draft has its own, and so has each size of `SHORT_PROMPTS`. Longer prompts are not captured.

    rounds at a bucket   1st: run from Python   2nd: recorded, then replayed   3rd, 4th, ...: replayed

The first round is the warm-up: it creates what is created lazily (communicators, compiled kernels, workspaces). Capture
computes nothing, so every round runs exactly once. A graph reads and writes the addresses of its capture. Values of
other stages have addresses fixed by the graphs of these stages, which are part of its key. Whatever else a round reads
must stay in place: when a tensor is allocated again, all graphs are dropped. `MOST_GRAPHED_BUCKETS` buckets have graphs
at most: a further one drops the graphs of the bucket that was read the longest time ago, which begins anew when it is
read again. A stage has at most `MOST_GRAPHS` graphs: a further one drops the one that was replayed the longest ago. All
of them leave their results in one place, or the pool would keep a law of all rows for each: results of the first one
stay where they are, and others copy theirs there. A stage that cannot be captured, for lack of memory too, runs from
Python, other stages as graphs. NCCL wants a message captured by all of its ranks or by none, so every decision here is
the same on each rank, and ranks ask each other whether a capture has failed there, or a tensor has moved.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from llama_ssp.architectures.engine import MOST_GRAPHED_BUCKETS, MOST_GRAPHS
from llama_ssp.ranks.gpu import capture_stream, is_lost
from llama_ssp.registry import operators
from llama_ssp.speculate.engine.round import Executor, Round, Stage
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.types import Values

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_STATE = len(BatchState._fields)
_Graph = tuple[Any, Callable[[], None]]
"""The results of a stage, and a call that computes them again."""


def make_executor(round_: Round, *, cuda_graphs: bool) -> Executor:
    """Make the executor for the target's device; `cuda_graphs` says whether a GPU's rounds are captured."""
    device = round_.target.device.type
    own: Executor | None = operators.made("executor", device, round_)
    if own or device == "cpu" or not cuda_graphs:
        return own or Executor()
    return GraphExecutor(round_, recorder=Recorder(finish=round_.verifier.comm.finish))


def tensors_of(value: Values) -> tuple[Tensor, ...]:
    """The tensors of a value of a stage, in order."""
    if isinstance(value, Tensor):
        return (value,)
    # No call for each tensor, since every round comes through here.
    return tuple(
        chain.from_iterable([(part,) if isinstance(part, Tensor) else part and tensors_of(part) for part in value])
    )


def filled(form: Values, tensors: Iterator[Any]) -> Values:
    """Return a value with the structure of `form`, made of the next tensors of the iterator."""
    if not isinstance(form, tuple):
        return next(tensors)
    parts = [part and filled(part, tensors) if isinstance(part, tuple) else next(tensors) for part in form]
    return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)


def _keys_in(key: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """A key of a stage, and the keys of the stages whose results it reads."""
    yield key
    for one in key[3:]:
        yield from _keys_in(one)


class Recorder:
    """Captures CUDA graphs that share a memory pool, which is safe because they never run concurrently.

    A later capture can use the pool's memory of a graph that was dropped before. `finish`, later called as `wait`,
    waits until the device has done everything that was launched.
    """

    def __init__(self, *, finish: Callable[[], None] = torch.cuda.synchronize) -> None:
        self.wait = finish
        self.forget()

    def record(
        self, piece: Callable[[], _T], put: Callable[[_T], _T] = lambda outputs: outputs
    ) -> tuple[_T, Callable[[], None]]:
        """Return the outputs of `piece`, in the tensors that `put` chooses and every replay overwrites, and the replay.

        Runs nothing. Raises RuntimeError if an operator cannot be recorded, or if memory runs out.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.wait()  # torch does so as well, but would wait for a lost rank without a limit
        try:
            # Threads of NCCL query their own events meanwhile, so only this thread's calls may invalidate the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=capture_stream(), capture_error_mode="thread_local"):
                outputs = put(piece())
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch skips this when ending a failed capture raises
            if not isinstance(error, torch.OutOfMemoryError):  # after which the capture has ended as any other
                self._pool: Any = torch.cuda.graph_pool_handle()  # torch may still keep the one before for this capture
            raise
        return outputs, graph.replay

    def forget(self) -> None:
        """Prepare for the end of all replays: wait for running ones, and begin a new pool."""
        self.wait()
        self._pool = torch.cuda.graph_pool_handle()


class GraphExecutor(Executor):
    """Replays the stages of a round as graphs; the next round overwrites the results on the same stream.

    Attributes:
        failed: the names of stages that could not be captured, with their operators. Such a stage runs from Python, and
            its results are copied to a fixed address, where graphs of other stages read them.
    """

    replays_addresses = True

    def __init__(self, round_: Round, *, recorder: Recorder) -> None:
        super().__init__()
        self.failed: set[tuple[str, Hashable]] = set()
        self._round, self._comm = round_, round_.verifier.comm
        self._recorder = recorder
        self._state: BatchState | None = None
        self._allocations = [""]
        self._forget()

    @property
    def captured(self) -> list[tuple[str, Hashable]]:
        """The names of the stages that are graphs now, with their operators, one of each graph."""
        return [key[:2] for key in self._graphs]

    def make_room(self) -> None:
        """See `Executor`."""
        allocations = self._comm.gather_text(str(self._round.num_allocations))
        if allocations != self._allocations:
            self._state, self._allocations = None, allocations

    def run(self, stage: Stage, state: BatchState, *values: Values) -> Values:
        """Run a stage: the first time from Python, the second time captured, then replayed; see `Executor`."""
        if state is not self._state:
            self._forget()
            self._state = state
        if stage.bucket not in (0, self._latest):
            self._read(stage.bucket)
        key, function = stage.key, partial(stage.function, state, *values)
        if graph := self._graphs.pop(key, None) or self._capture(stage, function, values):
            self._graphs[key] = outputs, replay = graph
            replay()
            return outputs
        found = function()
        if key[:3] not in self._met:
            self._met[key[:3]] = _storages(found)
        return self._in_place(stage, found) if self._fails(stage) else found

    def _capture(self, stage: Stage, function: Callable[[], Values], values: Values) -> _Graph | None:
        """Capture a stage as a graph; returns None if the stage must run from Python.

        That is so if a capture has failed, and as long as inputs may be at another address next time.
        """
        moves = any(one.key not in self._graphs and not self._fails(one) for one in stage.behind)
        if (known := self._met.get(stage.key[:3])) is None or moves or self._fails(stage):
            return None
        of_stage = [key for key in self._graphs if key[0] == stage.name]
        if len(of_stage) >= MOST_GRAPHS:
            self._drop(lambda key: key == of_stage[0])
        reason = ""
        try:
            graph = self._recorder.record(function, partial(self._put, stage, known | _storages(values)))
        except RuntimeError as error:
            if is_lost(error):
                raise
            is_full = isinstance(error, torch.OutOfMemoryError)  # torch's own sentences are many
            reason = "out of memory" if is_full else str(error).strip().partition("\n")[0] or type(error).__name__
        if stage.comm:
            reason = next(filter(None, stage.comm.gather_text(reason)), "")
        if not reason:
            return graph
        if stage.name not in [name for name, _ in self.failed]:
            _log.warning("%s runs from Python, since it could not be captured as a graph: %s", stage.name, reason)
        self.failed.add((stage.name, stage.operators))
        self._drop(lambda _: False)
        return None

    def _read(self, bucket: int) -> None:
        """Note that rounds now read a bucket; if there are too many buckets, drop the graphs of the oldest one.

        All ranks run stages of the same buckets in the same order, so they drop the same graphs.
        """
        self._latest = bucket
        self._buckets[bucket] = self._buckets.pop(bucket, None)
        if len(self._buckets) > MOST_GRAPHED_BUCKETS:
            oldest = next(iter(self._buckets))
            del self._buckets[oldest]
            for met in [key for key in self._met if key[2] == oldest]:
                del self._met[met]
            self._drop(lambda key: key[2] == oldest)

    def _drop(self, is_old: Callable[[tuple[Any, ...]], bool]) -> None:
        """Drop the graphs of some keys, and the graphs that read their results."""
        self._recorder.wait()
        for key in [key for key in self._graphs if any(map(is_old, _keys_in(key)))]:
            del self._graphs[key]
        if not self._graphs:  # a pool whose last graph is gone takes no other one
            self._recorder.forget()
            self._places.clear()  # without `_results`, which a graph of this round may read from now on

    def _fails(self, stage: Stage) -> bool:
        return (stage.name, stage.operators) in self.failed

    def _put(self, stage: Stage, known: frozenset[StorageWeakRef], found: Values) -> Values:
        """In a capture, put new results where all graphs of the stage have theirs; `known` tensors stay in place."""
        placed = []
        for number, tensor in enumerate(tensors_of(found)):
            place = tensor
            if StorageWeakRef(tensor.untyped_storage()) not in known:
                place = self._place(stage, number, tensor, stays=True)
                if place.data_ptr() != tensor.data_ptr():
                    place.copy_(tensor)
            placed.append(place)
        return filled(found, iter(placed))

    def _place(self, stage: Stage, number: int, result: Tensor, *, stays: bool = False) -> Tensor:
        """Return the memory of one result of a stage: the beginning of the stage's largest result of this kind so far.

        With `stays`, a larger result becomes that memory itself if it is not part of another one.
        """
        key = stage.name, number, result.dtype
        stays = stays and result.data_ptr() not in {place.data_ptr() for place in self._places.values()}
        if key not in self._places or self._places[key].numel() < result.numel():
            self._places[key] = (result.contiguous() if stays else torch.empty_like(result)).flatten()
        return self._places[key][: result.numel()].view(result.shape)

    def _in_place(self, stage: Stage, found: Values) -> Values:
        """Copy the results of a stage that runs from Python to the addresses at which graphs read them."""
        tensors = tensors_of(found)
        key = stage.name, stage.operators, *[tensor.shape for tensor in tensors]
        if key not in self._results:
            places = [self._place(stage, number, tensor) for number, tensor in enumerate(tensors)]
            self._results[key] = filled(found, iter(places))
        for place, tensor in zip(tensors_of(self._results[key]), tensors, strict=True):
            place.copy_(tensor)
        return self._results[key]

    def _forget(self) -> None:
        self._recorder.forget()
        self._graphs: dict[tuple[Any, ...], _Graph] = {}  # the latest last
        self._places: dict[Hashable, Tensor] = {}  # flat, of results
        self._results: dict[Hashable, Any] = {}  # of stages that have failed
        # By the beginning of a key, the memory of results of the first run: if a graph's are there too, they stay.
        self._met: dict[tuple[Any, ...], frozenset[StorageWeakRef]] = {}
        self._buckets: dict[int, None] = {}  # that have graphs or may, the latest last
        self._latest = 0


def _storages(value: Values) -> frozenset[StorageWeakRef]:
    return frozenset(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_of(value))

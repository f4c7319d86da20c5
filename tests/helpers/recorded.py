"""Graphs without a GPU: operators are written down with the very tensors they had, and run again on those.

As with CUDA graphs, recording changes nothing, a replay reads and writes the addresses of the recording, its results
overwrite those of the last one, and what would wait for the device cannot be recorded. A collective that is recorded
sends nothing, and a replay of it does. A graph keeps nothing alive that it has not made: a replay that reads a tensor
that was released is an AssertionError, and so is, with `WatchedGraphs`, one that reads other tensors than Python would.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from llama_ssp.manifest import present
from llama_ssp.speculate.engine.executors import GraphExecutor, Recorder
from llama_ssp.speculate.engine.round import Round, Stage
from llama_ssp.speculate.engine.state import BatchState

recording: Callable[[], AbstractContextManager[None]] = nullcontext
if "cpu" in present():  # whose collectives are operators, which send nothing then
    recording = import_module("llama_ssp.extensions.cpu.sums").recording
_T = TypeVar("_T")
_Call = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]
"""An operator, its arguments, and the tensors that it has made."""
MOST_COMPARED = 3
"""First replays of a graph that are compared, and how many of the later ones are for each that is."""
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::argwhere",
    "aten::masked_select",
    "aten::bincount",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::lift_fresh",
    "aten::resolve_conj",
}
"""Operators that wait. `lift_fresh` makes tensors of numbers and lists; `tolist` and `numpy` call `resolve_conj`."""
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


class _Log(TorchDispatchMode):
    def __init__(self, unrecordable: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.undo: list[tuple[Tensor, Tensor]] = []
        self._unrecordable = unrecordable

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if _waits(func, args, kwargs) or name == self._unrecordable:
            raise RuntimeError(f"{name} cannot be recorded\nand more about it")
        given = _tensors((args, kwargs))
        is_collective = func.namespace == "llama_ssp"
        is_writing = func._schema.is_mutable or is_collective
        if is_collective:
            self.undo += [(tensor, tensor.clone()) for tensor in given]
        elif is_writing:
            written = [
                args[place] if place < len(args) else kwargs[argument.name]
                for place, argument in enumerate(func._schema.arguments)
                if argument.alias_info and argument.alias_info.is_write
            ]
            self.undo += [(tensor, tensor.clone()) for tensor in _tensors(written)]
        result = func(*args, **kwargs)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in addresses]
        if made or is_writing:
            self.calls.append((func, args, kwargs, made))
        return result


def _waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator waits for a device, as those do whose results have as many elements as values say."""
    name, overload = func._schema.name, func._overloadname
    if name in _INDEXING:
        return any(index.dtype in {torch.bool, torch.uint8} for index in _tensors(args[1]))
    if name == "aten::repeat_interleave":
        return overload in {"Tensor", "self_Tensor"} and kwargs.get("output_size") is None
    return name in _WAITING or (name, overload) == ("aten::where", "default")


@dataclass(frozen=True)
class _Outside:
    """A tensor that a recording has not made, without its memory."""

    storage: StorageWeakRef
    address: int
    dtype: torch.dtype
    places: tuple[int, tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Outside":
        storage = tensor.untyped_storage()
        places = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        return cls(StorageWeakRef(storage), storage.data_ptr(), tensor.dtype, places)

    def seen(self) -> tuple[object, ...]:
        return self.address, self.dtype, *self.places

    def found(self) -> Tensor:
        shape = self.places[1]
        assert not self.storage.expired(), f"a replay reads a tensor of shape {shape} that was released"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage.data_ptr() == self.address, f"a replay reads a tensor of shape {shape} that was moved"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.places)


def _logged(piece: Callable[[], _T], unrecordable: str | None = None) -> tuple[_T, _Log]:
    """Run a piece, undo what it has written, and return its outputs with its operators."""
    log = _Log(unrecordable)
    try:
        with recording(), log:
            outputs = piece()
    finally:
        for tensor, before in reversed(log.undo):
            tensor.copy_(before)
        log.undo.clear()
    return outputs, log


def _without_outside(log: _Log) -> list[_Call]:
    """The calls of a log, with an `_Outside` for each tensor that none of them has made."""
    own = {tensor.untyped_storage().data_ptr() for *_, made in log.calls for tensor in made}

    def weak(value: Any) -> Any:
        is_outside = isinstance(value, Tensor) and value.numel() > 0 and value.untyped_storage().data_ptr() not in own
        return _Outside.of(value) if is_outside else value

    return [(func, tree_map(weak, args), tree_map(weak, kwargs), made) for func, args, kwargs, made in log.calls]


class FakeRecorder(Recorder):
    """A `Recorder` for the CPU.

    Args:
        unrecordable: name of an operator that cannot be recorded either.

    Attributes:
        num_recorded, num_replayed, num_forgotten: how often it was called.
    """

    def __init__(self, unrecordable: str | None = None) -> None:
        self.num_recorded = self.num_replayed = self.num_forgotten = 0
        self._unrecordable = unrecordable

    def record(
        self, piece: Callable[[], _T], put: Callable[[_T], _T] = lambda outputs: outputs
    ) -> tuple[_T, Callable[[], None]]:
        outputs, log = _logged(lambda: put(piece()), self._unrecordable)
        calls = _without_outside(log)
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            self._before_replay(calls)
            for func, args, kwargs, made in calls:
                given, named = tree_map(_held, (args, kwargs))
                result = func(*given, **named)
                if made:
                    new = _tensors(result)[-len(made) :]
                    for tensor, value in zip(made, new, strict=True):
                        tensor.copy_(value)

        return outputs, replay

    def forget(self) -> None:
        self.num_forgotten += 1

    def wait(self) -> None:
        """A CPU has nothing in flight."""

    def _before_replay(self, calls: Sequence[_Call]) -> None:
        """Look at what a replay is going to call."""


def _held(value: Any) -> Any:
    return value.found() if isinstance(value, _Outside) else value


class _Comparing(FakeRecorder):
    """Compares what a replay calls with what Python calls now, the first times and then now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.refused = "", ""
        self.piece: Callable[[], object] = lambda: None
        self.num_of: Counter[str] = Counter()
        self._num_replayed: Counter[int] = Counter()

    def record(
        self, piece: Callable[[], _T], put: Callable[[_T], _T] = lambda outputs: outputs
    ) -> tuple[_T, Callable[[], None]]:
        if self.name == self.refused:
            raise RuntimeError("it is refused")
        return super().record(piece, put)

    def _before_replay(self, calls: Sequence[_Call]) -> None:
        self._num_replayed[id(calls)] += 1
        number = self._num_replayed[id(calls)]
        if number == 1 or (number > MOST_COMPARED and number % MOST_COMPARED):
            return  # it was recorded just now
        self.num_of[self.name] += 1
        now = _without_outside(_logged(self.piece)[1])
        for recorded, called in zip_longest(map(_read, calls), map(_read, now)):
            puts = called is None and recorded[0] == "aten.copy_.default"  # of the graph's own, at its end
            assert puts or recorded == called, f"{self.name}: a replay calls {recorded}, and Python calls {called}"


def _read(call: _Call) -> tuple[str, list[object]]:
    """The operator of a call, and what it reads that was there before."""
    func, args, kwargs, _ = call
    return str(func), [value.seen() for value in tree_flatten((args, kwargs))[0] if isinstance(value, _Outside)]


class WatchedGraphs(GraphExecutor):
    """Compares what a replay calls and reads, by address and shape, with what Python would call and read.

    Attributes:
        refused: the name of a stage that cannot be recorded.
        num_of: replays so far that were compared, by stage.
    """

    refused = ""

    def __init__(self, round_: Round) -> None:
        self._comparing = _Comparing()
        self._comparing.refused = self.refused
        self.num_of = self._comparing.num_of
        super().__init__(round_, recorder=self._comparing)

    @property
    def num_compared(self) -> int:
        return self.num_of.total()

    def run(self, stage: Stage, state: BatchState, *values: Any) -> Any:
        self._comparing.name, self._comparing.piece = stage.name, partial(stage.function, state, *values)
        return super().run(stage, state, *values)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]

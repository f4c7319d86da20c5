"""Graphs without a GPU: operators are written down with the very tensors they had, and run again on those.

As with CUDA graphs, recording changes nothing, a replay reads and writes the addresses of the recording, its results
overwrite those of the last one, and what would wait for the device cannot be recorded. A collective that is recorded
sends nothing, and a replay of it does. A graph keeps nothing alive that it has not made: a replay that reads a tensor
that was released is an AssertionError, and so is, with `WatchedGraphs`, one that reads other tensors than Python would.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from llama_ssp.cpu.sums import recording
from llama_ssp.speculate.engine.executors import GraphExecutor, Recorder
from llama_ssp.speculate.engine.round import Round, Stage
from llama_ssp.speculate.engine.state import BatchState

_T = TypeVar("_T")
_WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::equal", "aten::masked_select"}


class _Log(TorchDispatchMode):
    def __init__(self, unrecordable: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.undo: list[tuple[Tensor, Tensor]] = []
        self._unrecordable = unrecordable

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _WAITING or name == self._unrecordable:
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


def _without_outside(log: _Log) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]]:
    """The calls of a log, with an `_Outside` for each tensor that none of them has made."""
    own = {tensor.untyped_storage().data_ptr() for *_, made in log.calls for tensor in made}

    def weak(value: Any) -> Any:  # noqa: ANN401 - any leaf
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

    def record(self, piece: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        outputs, log = _logged(piece, self._unrecordable)
        calls = _without_outside(log)
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
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


def _held(value: Any) -> Any:  # noqa: ANN401 - any leaf
    return value.found() if isinstance(value, _Outside) else value


class WatchedGraphs(GraphExecutor):
    """Compares the addresses that a stage reads in a replay with those that Python would read.

    Attributes:
        num_compared: replays so far.
    """

    num_compared = 0

    def __init__(self, round_: Round) -> None:
        self._seen: dict[Hashable, list[int]] = {}
        super().__init__(round_, recorder=FakeRecorder())

    def run(self, stage: Stage, state: BatchState, *tensors: Tensor) -> Any:  # noqa: ANN401 - what the stage returns
        key = stage.name, stage.choice, stage.bucket
        was_recorded, now = key in self._graphs, None
        if key in self._met:
            now = self._addresses(partial(stage.function, state, *tensors))
        outputs = super().run(stage, state, *tensors)
        if now is None or key not in self._graphs:
            return outputs
        if was_recorded:
            self.num_compared += 1
            assert now == self._seen[key], f"{stage.name} would read other tensors than its recording did"
        self._seen[key] = now
        return outputs

    @staticmethod
    def _addresses(piece: Callable[[], object]) -> list[int]:
        values, _ = tree_flatten(_without_outside(_logged(piece)[1]))
        return [value.address for value in values if isinstance(value, _Outside)]


def _tensors(values: Any) -> list[Tensor]:  # noqa: ANN401 - any tree
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]

"""Graphs without a GPU: operators are written down with the very tensors they had, and run again on those.

As with CUDA graphs, recording changes nothing, a replay reads and writes the addresses of the recording, its results
overwrite those of the last one, and what would wait for the device cannot be recorded. A collective that is recorded
sends nothing, and a replay of it does.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from llama_ssp.cpu.sums import recording

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


class FakeRecorder:
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
        log = _Log(self._unrecordable)
        try:
            with recording(), log:
                outputs = piece()
        finally:
            for tensor, before in reversed(log.undo):
                tensor.copy_(before)
        calls = log.calls
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            for func, args, kwargs, made in calls:
                result = func(*args, **kwargs)
                if made:
                    new = _tensors(result)[-len(made) :]
                    for tensor, value in zip(made, new, strict=True):
                        tensor.copy_(value)

        return outputs, replay

    def forget(self) -> None:
        self.num_forgotten += 1


def _tensors(values: Any) -> list[Tensor]:  # noqa: ANN401 - any tree
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]

"""Collectives as operators of torch, so that a recorded function can hold them (see `recorded`).

    function at work    Comm.all_reduce -> board or backend
    being recorded      Comm.all_reduce -> llama_ssp::all_reduce, which sends nothing
    replayed                               llama_ssp::all_reduce -> Comm.all_reduce -> board or backend

While a rank records it sends nothing, so that others need not record at the same time, or at all; what it would hear is
zeros. What a collective raises is kept: on its way through torch's interpreter it would lose its type.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_library = torch.library.Library("llama_ssp", "DEF")
_SCHEMAS = (
    "all_reduce(Tensor values, int group) -> Tensor",
    "all_gather_last(Tensor values, int[] sizes, int group) -> Tensor",
    "broadcast(Tensor values, int src, int group) -> Tensor",
    "send(Tensor values, int dst, int group) -> Tensor",
    "receive(Tensor values, int src, int group) -> Tensor",
)
for _schema in _SCHEMAS:
    # Conservative: it stays in a recording where nobody on this rank reads its result, for the sake of the others.
    _library.define(_schema, "CONSERVATIVE")


class Collectives(Protocol):
    """What the operators call; see `comms.Comm`."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Add up, in place."""
        ...

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Join along the last dimension."""
        ...

    def broadcast(self, values: Tensor, *, src: int) -> Tensor:
        """Take the values of one rank, in place."""
        ...

    def send(self, values: Tensor, *, dst: int) -> Tensor:
        """Give values to one rank."""
        ...

    def receive(self, values: Tensor, *, src: int) -> Tensor:
        """Take what one rank sends, in place."""
        ...


_groups: WeakValueDictionary[int, Collectives] = WeakValueDictionary()
_this_thread = threading.local()


def is_recording() -> bool:
    """Whether what this thread calls is being recorded."""
    return getattr(_this_thread, "is_recording", False)


@contextmanager
def recording() -> Iterator[None]:
    """Record what this thread calls; torch itself says so everywhere but inside of an operator."""
    _this_thread.is_recording = True
    try:
        yield
    finally:
        _this_thread.is_recording = False


def record(name: str, group: Collectives, values: Tensor, *more: int | list[int]) -> Tensor:
    """Put one of the operators into the recording at hand.

    Args:
        name: the operator's.
        group: whose collective it is.
        values: the collective's first argument.
        more: its others.
    """
    _groups[id(group)] = group
    result: Tensor = getattr(torch.ops.llama_ssp, name)(values, *more, id(group))
    return result


def take_error() -> BaseException | None:
    """What a collective has raised inside of a replay, for the one who made the replay to raise again."""
    error: BaseException | None = _this_thread.__dict__.pop("error", None)
    return error


def _at_work(call: Callable[[], Tensor]) -> Tensor:
    try:
        return call()
    except BaseException as error:
        _this_thread.error = error
        raise


def _all_reduce(values: Tensor, group: int) -> Tensor:
    return values if is_recording() else _at_work(lambda: _groups[group].all_reduce(values))


def _all_gather_last(values: Tensor, sizes: list[int], group: int) -> Tensor:
    if is_recording():
        return values.new_zeros(*values.shape[:-1], sum(sizes))
    return _at_work(lambda: _groups[group].all_gather_last(values, tuple(sizes)))


def _broadcast(values: Tensor, src: int, group: int) -> Tensor:
    return values.zero_() if is_recording() else _at_work(lambda: _groups[group].broadcast(values, src=src))


def _send(values: Tensor, dst: int, group: int) -> Tensor:
    return values if is_recording() else _at_work(lambda: _groups[group].send(values, dst=dst))


def _receive(values: Tensor, src: int, group: int) -> Tensor:
    return values.zero_() if is_recording() else _at_work(lambda: _groups[group].receive(values, src=src))


for _operator in (_all_reduce, _all_gather_last, _broadcast, _send, _receive):
    _library.impl(_operator.__name__.removeprefix("_"), _operator, "CPU")

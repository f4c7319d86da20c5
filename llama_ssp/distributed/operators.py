"""Collectives as operators of torch, so that a recorded forward can hold them (see `recorded`).

    forward at work     Comm.all_reduce -> board or backend
    being recorded      Comm.all_reduce -> llama_ssp::all_reduce, which sends nothing
    replayed                               llama_ssp::all_reduce -> Comm.all_reduce -> board or backend

While a rank records it sends nothing, so that others need not record at the same time, or at all. What a collective
raises is kept: on its way through torch's interpreter it would lose its type.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_library = torch.library.Library("llama_ssp", "DEF")
_library.define("all_reduce(Tensor(a!) values, int group) -> Tensor(a!)")
_library.define("all_gather_last(Tensor values, int[] sizes, int group) -> Tensor")


class Collectives(Protocol):
    """What the operators call; see `comms.Comm`."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Add up, in place."""
        ...

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Join along the last dimension."""
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


def record_all_reduce(group: Collectives, values: Tensor) -> Tensor:
    """Put the operator into the recording at hand."""
    summed: Tensor = torch.ops.llama_ssp.all_reduce(values, _number_of(group))
    return summed


def record_all_gather_last(group: Collectives, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Put the operator into the recording at hand."""
    joined: Tensor = torch.ops.llama_ssp.all_gather_last(values, list(sizes), _number_of(group))
    return joined


def take_error() -> BaseException | None:
    """What a collective has raised inside of a replay, for the one who made the replay to raise again."""
    error: BaseException | None = _this_thread.__dict__.pop("error", None)
    return error


def _number_of(group: Collectives) -> int:
    _groups[id(group)] = group
    return id(group)


def _all_reduce(values: Tensor, group: int) -> Tensor:
    if is_recording():
        return values
    try:
        return _groups[group].all_reduce(values)
    except BaseException as error:
        _this_thread.error = error
        raise


def _all_gather_last(values: Tensor, sizes: list[int], group: int) -> Tensor:
    if is_recording():
        return values.new_zeros(*values.shape[:-1], sum(sizes))
    try:
        return _groups[group].all_gather_last(values, tuple(sizes))
    except BaseException as error:
        _this_thread.error = error
        raise


_library.impl("all_reduce", _all_reduce, "CPU")
_library.impl("all_gather_last", _all_gather_last, "CPU")

"""Collectives as torch operators, so that a trace can hold them (see `engine.executors.tracing`).

    not traced     Comm.all_reduce -> shared memory or backend
    tracing        Comm.all_reduce -> llama_ssp::all_reduce, which sends nothing
    replay                            llama_ssp::all_reduce -> Comm.all_reduce -> shared memory or backend

A tracing rank sends nothing and receives zeros, so ranks can trace at different times. Errors of a collective are kept
here, because torch's interpreter would lose their type.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:  # that module imports this one
    from llama_ssp.distributed.comms import Comm

_library = torch.library.Library("llama_ssp", "DEF")
_SCHEMAS = (
    "all_reduce(Tensor values, int group) -> Tensor",
    "all_gather_last(Tensor values, int[] sizes, int group) -> Tensor",
    "broadcast(Tensor values, int src, int group) -> Tensor",
    "send(Tensor values, int dst, int group) -> Tensor",
    "receive(Tensor values, int src, int group) -> Tensor",
)
for _schema in _SCHEMAS:
    # Conservative: it stays in the trace even if this rank does not read its result, because other ranks wait for it.
    _library.define(_schema, "CONSERVATIVE")

_groups: WeakValueDictionary[int, "Comm"] = WeakValueDictionary()
_this_thread = threading.local()


def is_recording() -> bool:
    """Whether this thread is tracing."""
    return getattr(_this_thread, "is_recording", False)


@contextmanager
def recording() -> Iterator[None]:
    """Mark this thread as tracing; torch's own flag is not set inside an operator."""
    _this_thread.is_recording = True
    try:
        yield
    finally:
        _this_thread.is_recording = False


def record(name: str, group: "Comm", values: Tensor, *more: int | list[int]) -> Tensor:
    """Add operator `name` to the current trace, with the arguments of the group's collective."""
    _groups[id(group)] = group
    result: Tensor = getattr(torch.ops.llama_ssp, name)(values, *more, id(group))
    return result


def take_error() -> BaseException | None:
    """Return and clear the error that a collective raised during a replay, to raise it again."""
    error: BaseException | None = _this_thread.__dict__.pop("error", None)
    return error


def _keeping_error(call: Callable[[], Tensor]) -> Tensor:
    try:
        return call()
    except BaseException as error:
        _this_thread.error = error
        raise


def _all_reduce(values: Tensor, group: int) -> Tensor:
    return values if is_recording() else _keeping_error(lambda: _groups[group].all_reduce(values))


def _all_gather_last(values: Tensor, sizes: list[int], group: int) -> Tensor:
    if is_recording():
        return values.new_zeros(*values.shape[:-1], sum(sizes))
    return _keeping_error(lambda: _groups[group].all_gather_last(values, tuple(sizes)))


def _broadcast(values: Tensor, src: int, group: int) -> Tensor:
    return values.zero_() if is_recording() else _keeping_error(lambda: _groups[group].broadcast(values, src=src))


def _send(values: Tensor, dst: int, group: int) -> Tensor:
    return values if is_recording() else _keeping_error(lambda: _groups[group].send(values, dst=dst))


def _receive(values: Tensor, src: int, group: int) -> Tensor:
    return values.zero_() if is_recording() else _keeping_error(lambda: _groups[group].receive(values, src=src))


for _operator in (_all_reduce, _all_gather_last, _broadcast, _send, _receive):
    _library.impl(_operator.__name__.removeprefix("_"), _operator, "CPU")

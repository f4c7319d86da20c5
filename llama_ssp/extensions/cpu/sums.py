"""Collectives of CPUs as operators of torch, so that a trace can hold them.

A rank that traces sends nothing and receives zeros, so that ranks can trace at different times. Errors of a collective
are kept here, because torch's interpreter would lose their type.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_ARGUMENTS = {
    "all_reduce": "",
    "all_gather_last": "int[] sizes, ",
    "broadcast": "int src, ",
    "send": "int dst, ",
    "receive": "int src, ",
}
"""The collectives, and their arguments after the values."""
_library = torch.library.Library("llama_ssp", "DEF")
_groups: WeakValueDictionary[int, Any] = WeakValueDictionary()
_this_thread = threading.local()


@contextmanager
def recording() -> Iterator[None]:
    """Mark this thread as tracing; torch's own flag is not set inside an operator."""
    _this_thread.is_recording = True
    try:
        yield
    finally:
        _this_thread.is_recording = False


def call(name: str, group: object, values: Tensor, *more: int | tuple[int, ...]) -> Tensor:
    """Run a collective as an operator, which calls the method `do_NAME` of the group with the same arguments."""
    _groups[id(group)] = group
    take_error()
    result: Tensor = getattr(torch.ops.llama_ssp, name)(values, *more, id(group))
    return result


def find_collectives() -> Callable[..., Tensor]:
    """The function that calls collectives as operators."""
    return call


def take_error() -> BaseException | None:
    """Return and clear the error that a collective raised during a replay, to raise it again."""
    error: BaseException | None = _this_thread.__dict__.pop("error", None)
    return error


def _operator(name: str) -> Callable[..., Tensor]:
    def operate(values: Tensor, *more: Any) -> Tensor:
        group = more[-1]
        given = [tuple(part) if isinstance(part, list) else part for part in more[:-1]]
        if getattr(_this_thread, "is_recording", False):
            if name == "all_gather_last":
                return values.new_zeros(*values.shape[:-1], sum(given[0]))
            return values if name in {"all_reduce", "send"} else values.zero_()
        try:
            result: Tensor = getattr(_groups[group], f"do_{name}")(values, *given)
        except BaseException as error:
            _this_thread.error = error
            raise
        return result

    return operate


for _name, _more in _ARGUMENTS.items():
    # Conservative: it stays in the trace even if this rank does not read its result, because other ranks wait for it.
    _library.define(f"{_name}(Tensor values, {_more}int group) -> Tensor", "CONSERVATIVE")
    _library.impl(_name, _operator(_name), "CPU")

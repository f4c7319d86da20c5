"""Functions of tensors on the CPU without Python in between: recorded once for each shape, then replayed by torch.

A small forward is some hundreds of operators, and a third of its time is Python's, which calls them. torch's tracer
keeps the calls, and its interpreter repeats them: the same kernels on the same numbers, so the same bits.

    calls of a shape    1st: from Python    2nd: recorded, then replayed    3rd, 4th, ...: replayed

Recording runs the function once more, so that it may only write what it writes again. What it reads is either an
argument or stays as it is; what it writes is an argument.
"""

import logging
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from llama_ssp.distributed.operators import recording, take_error

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result", bound=Tensor | tuple[Tensor, ...])

_log = logging.getLogger(__name__)
_one_at_a_time = Lock()
_CANNOT = (RuntimeError, AttributeError, TypeError)  # an operator, or another interface of torch's than is known


class Recorded(Generic[_Key, _Result]):
    """A function that is recorded.

    Args:
        function: maps a key and tensors to one or more, with the same operators whenever the key is the same.
        held: objects of `models`, and modules, that hold what it reads beside its arguments.
    """

    def __init__(self, function: Callable[..., _Result], *held: object) -> None:
        self._function = function
        self._held = held
        self._replays: dict[_Key, Callable[..., _Result] | None] = {}
        self.failed = False

    def __call__(self, key: _Key, *arguments: Tensor) -> _Result:
        """Do it.

        Args:
            key: all that decides which operators run; the function's first argument.
            arguments: its others.
        """
        if self.failed or key not in self._replays:
            self._replays[key] = None
            return self._function(key, *arguments)
        replay = self._replays[key]
        if replay is None:
            try:
                replay = self._replays[key] = self._record(key, arguments)
            except _CANNOT as error:
                reason = str(error).strip().partition("\n")[0]
                _log.warning("going on without a recording: %s", reason)
                self.failed = True
                return self._function(key, *arguments)
        try:
            with _as_recorded():
                return replay(*arguments)
        except RuntimeError as error:
            raise take_error() or error from None

    def _record(self, key: _Key, arguments: tuple[Tensor, ...]) -> Callable[..., _Result]:
        """What `torch.jit.trace` does, but for what it keeps: torch would never let go of its recordings."""
        names = [f"argument_{number}" for number in range(len(arguments))]
        with _one_at_a_time, recording(), warnings.catch_warnings(), _as_recorded():
            warnings.simplefilter("ignore")  # of sizes that become constants, which the key answers for
            holder = _holder(self._held)
            graph, _ = torch._C._create_graph_by_tracing(
                partial(self._function, key), arguments, lambda _: "", True, False, holder, names
            )  # fmt: skip
            replay = torch._C._create_function_from_graph("replay", graph)
        return partial(replay, holder)


def _holder(held: object) -> object:
    """What a recording reads beside its arguments, as torch's interpreter wants it."""
    module = torch._C.ScriptModule("Holder", torch._C.CompilationUnit(), False)  # type: ignore[call-arg]
    for number, leaf in enumerate({id(leaf): leaf for leaf in _leaves(held)}.values()):
        module._register_attribute(f"held_{number}", torch._C._jit_try_infer_type(leaf).type(), leaf)  # type: ignore[attr-defined]
    return module


def _as_recorded() -> AbstractContextManager[None]:
    """What an optimizer could find is not worth the time that it looks for it: some ten forwards."""
    context: AbstractContextManager[None] = torch.jit.optimized_execution(should_optimize=False)  # type: ignore[attr-defined]
    return context


def _leaves(value: object) -> Iterator[object]:
    """Tensors and packed weights in objects of `models`, and in modules."""
    if isinstance(value, Tensor | torch.ScriptObject):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif type(value).__module__.startswith("llama_ssp.models."):
        yield from _leaves(list(vars(value).values()))

"""Functions of tensors on the CPU without Python in between: recorded once for each shape, then replayed by torch.

A small forward is some hundreds of operators, and a third of its time is Python's, which calls them. torch's tracer
keeps the calls, and its interpreter repeats them: the same kernels on the same numbers, so the same bits.

    calls of a shape    1st: from Python    2nd: recorded, then replayed    3rd, 4th, ...: replayed

What a function reads and writes is an argument, or held: named beside the arguments, because it seldom changes and
there is much of it, such as weights and caches. Recording runs the function once more, on copies of the arguments; what
it holds it may only write as it will write it again.
"""

import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from llama_ssp.distributed.operators import recording, take_error

Leaf = Tensor | torch.ScriptObject
"""A tensor, or weights in a form of torch's own."""
Held = tuple[Sequence[Leaf], ...]
"""What is held, in parts: each stays the same object until something in it becomes another."""

_Result = TypeVar("_Result", bound=Tensor | tuple[Tensor, ...])

_log = logging.getLogger(__name__)
_one_at_a_time = Lock()
_is_optimizing, _set_optimizing = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize
_CANNOT = (RuntimeError, AttributeError, TypeError)  # an operator, or another interface of torch's than is known


class Recorded(Generic[_Result]):
    """A function that is recorded.

    Args:
        function: maps tensors to one or more, with the same operators whenever the key is the same.

    Attributes:
        failed: recording has failed once; since then the function is called from Python.
    """

    def __init__(self, function: Callable[..., _Result]) -> None:
        self._function = function
        self._replays: dict[Hashable, Callable[..., _Result] | None] = {}
        self._holder: Any = None
        self._held: list[Sequence[Leaf]] = []
        self.failed = False

    def __call__(self, key: Hashable, *arguments: Tensor, held: Held = ()) -> _Result:
        """Do it.

        Args:
            key: all that decides which operators run.
            arguments: the function's.
            held: what else it reads or writes; always as many, and in the same order.
        """
        if self.failed or key not in self._replays:
            self._replays[key] = None
            return self._function(*arguments)
        self._hold(held)
        replay = self._replays[key]
        if replay is None:
            try:
                replay = self._replays[key] = self._record(arguments)
            except _CANNOT as error:
                reason = str(error).strip().partition("\n")[0]
                _log.warning("going on without a recording: %s", reason)
                self.failed = True
                return self._function(*arguments)
        before = _is_optimizing()
        _set_optimizing(False)  # what `_without_optimizer` does, in less time
        try:
            return replay(*arguments)
        except BaseException as error:  # noqa: BLE001 - it is raised again
            raise take_error() or error from None
        finally:
            _set_optimizing(before)

    def _hold(self, held: Held) -> None:
        """Give recordings what is held now."""
        if self._holder is None:
            self._holder = torch._C.ScriptModule("Holder", torch._C.CompilationUnit(), False)  # type: ignore[call-arg]
        number = 0
        for place, part in enumerate(held):
            if place == len(self._held):
                self._held.append(())
            if part is not self._held[place]:
                self._held[place] = part
                for each, leaf in enumerate(part, start=number):
                    name = f"held_{each}"
                    if not self._holder.hasattr(name):
                        self._holder._register_attribute(name, torch._C._jit_try_infer_type(leaf).type(), leaf)
                    else:
                        self._holder.setattr(name, leaf)
            number += len(part)

    def _record(self, arguments: tuple[Tensor, ...]) -> Callable[..., _Result]:
        """What `torch.jit.trace` does, but for what it keeps: torch would never let go of its recordings."""
        copies = tuple(argument.clone() for argument in arguments)
        names = [f"argument_{number}" for number in range(len(copies))]
        with _one_at_a_time, recording(), warnings.catch_warnings(), _without_optimizer():
            warnings.simplefilter("ignore")  # of sizes that become constants, which the key answers for
            graph, _ = torch._C._create_graph_by_tracing(
                self._function, copies, lambda _: "", True, False, self._holder, names
            )  # fmt: skip
            _check_constants(graph)
            replay = torch._C._create_function_from_graph("replay", graph)
        return partial(replay, self._holder)


def leaves(value: object) -> Iterator[Leaf]:
    """Tensors and packed weights in objects of `models`, and in modules."""
    if isinstance(value, Tensor | torch.ScriptObject):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif type(value).__module__.startswith("llama_ssp.models."):
        yield from leaves(list(vars(value).values()))


def sizes(values: Tensor) -> tuple[int, ...]:
    """The shape in plain numbers, for which no recording will ask the tensor again."""
    return tuple(int(size) for size in values.shape)


def _check_constants(graph: Any) -> None:  # noqa: ANN401 - torch does not name its type
    """Find what a recording has taken for a constant although it is neither a number nor held.

    Raises:
        RuntimeError: there is such a tensor, which may be another one, or elsewhere, when the recording is replayed.
    """
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t" and node.t("value").dim():
            raise RuntimeError(f"a tensor of shape {tuple(node.t('value').shape)} is neither an argument nor held")


@contextmanager
def _without_optimizer() -> Iterator[None]:
    """What an optimizer could find is not worth the time that it looks for it: some ten forwards."""
    before = _is_optimizing()
    _set_optimizing(False)
    try:
        yield
    finally:
        _set_optimizing(before)

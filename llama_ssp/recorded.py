"""Functions of tensors on the CPU without Python in between: recorded once for each shape, then replayed by torch.

A small forward is some hundreds of operators, and a third of its time is Python's, which calls them. torch's tracer
keeps the calls, and its interpreter repeats them: the same kernels on the same numbers, so the same bits.

    calls of a shape    1st: from Python    2nd: recorded, then replayed    3rd, 4th, ...: replayed

What a function reads and writes is an argument, or held: named beside the arguments, because there is much of it, such
as weights and caches. Recording runs the function once more, on copies of the arguments; what it holds it may only
write as it will write it again.
"""

import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from llama_ssp.distributed.operators import recording, take_error

Leaf = Tensor | torch.ScriptObject
"""A tensor, or weights in a form of torch's own."""


class Held(NamedTuple):
    """What a function reads and writes beside its arguments.

    Attributes:
        weights: the same at every call.
        made: always as many, in the same order, but others when caches are made anew or read to another width.
    """

    weights: Sequence[Leaf] = ()
    made: Sequence[Tensor] = ()

    def beside(self, tables: Sequence[Tensor]) -> "Held":
        """This, and some more."""
        return Held(self.weights, (*self.made, *tables))


_NOTHING = Held()
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
        self.failed = False

    def __call__(self, key: Hashable, *arguments: Tensor, held: Held = _NOTHING) -> _Result:
        """Do it.

        Args:
            key: all that decides which operators run.
            arguments: the function's.
            held: what else it reads or writes.
        """
        if self.failed or key not in self._replays:
            self._replays[key] = None
            return self._function(*arguments)
        replay = self._replays[key]
        if replay is None:
            try:
                replay = self._replays[key] = self._record(arguments, held)
            except _CANNOT as error:
                reason = str(error).strip().partition("\n")[0]
                _log.warning("going on without a recording: %s", reason)
                self.failed = True
                return self._function(*arguments)
        before = _is_optimizing()
        _set_optimizing(False)  # what `_without_optimizer` does, in less time
        try:
            return replay(*arguments, *held.made)
        except BaseException as error:  # noqa: BLE001 - it is raised again
            raise take_error() or error from None
        finally:
            _set_optimizing(before)

    def _record(self, arguments: tuple[Tensor, ...], held: Held) -> Callable[..., _Result]:
        """What `torch.jit.trace` does, but for what it keeps: torch would never let go of its recordings."""
        if self._holder is None:
            self._holder = _holder(held.weights)
        inputs = *(argument.clone() for argument in arguments), *held.made
        names = [f"input_{number}" for number in range(len(inputs))]
        with _one_at_a_time, recording(), warnings.catch_warnings(), _without_optimizer():
            warnings.simplefilter("ignore")  # of sizes that become constants, which the key answers for
            graph, _ = torch._C._create_graph_by_tracing(
                lambda *tensors: self._function(*tensors[: len(arguments)]),
                inputs, lambda _: "", True, False, self._holder, names,
            )  # fmt: skip
            _check_constants(graph)
            replay = torch._C._create_function_from_graph("replay", graph)
        return partial(replay, self._holder)


def _holder(weights: Sequence[Leaf]) -> object:
    """What all recordings of a function read, as torch's interpreter wants it."""
    module = torch._C.ScriptModule("Holder", torch._C.CompilationUnit(), False)  # type: ignore[call-arg]
    for number, leaf in enumerate(weights):
        module._register_attribute(f"weight_{number}", torch._C._jit_try_infer_type(leaf).type(), leaf)  # type: ignore[attr-defined]
    return module


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
    elif type(value).__module__.startswith(("llama_ssp.models.", "bitsandbytes.")):
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

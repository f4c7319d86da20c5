"""Functions of tensors on the CPU without Python in between: traced once for each shape, then replayed by torch.

A small forward is some hundreds of operators, and a third of its time is Python's, which calls them. torch's tracer
keeps the calls, and its interpreter repeats them: the same kernels on the same numbers, so the same bits.

    calls of a shape    1st: from Python    2nd: traced, then replayed    3rd, 4th, ...: replayed

What a function reads and writes is either an argument, or reachable from the objects named when it is wrapped: their
weights, which stay where they are, and what their `allocate` makes, which may move. The tensors are found by walking
those objects. Tracing runs the function once more, on copies of the arguments; a tensor that is found and not an
argument may only be written as it will be written again.
"""

import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from llama_ssp.distributed.operators import recording, take_error
from llama_ssp.models.cache import PerBucket, Workspace

Leaf = Tensor | torch.ScriptObject
"""A tensor, or weights in a form of torch's own."""

_Result = TypeVar("_Result", bound=Tensor | tuple[Tensor, ...])

_log = logging.getLogger(__name__)
_one_at_a_time = Lock()
_is_optimizing, _set_optimizing = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize
_CANNOT = (RuntimeError, AttributeError, TypeError)  # an operator, or another interface of torch's than is known
_NOT_WALKED = ("builtins", "torch", "transformers", "llama_ssp.config", "llama_ssp.distributed")


class Traced(Generic[_Result]):
    """A function that is traced.

    Args:
        function: maps tensors to one or more, with the same operators whenever the key is the same.
        reads: objects whose tensors it reads and writes apart from its arguments.

    Attributes:
        failed: tracing has failed once; since then the function is called from Python.
        replays: by key, the replay; None while there was only the first call.
    """

    def __init__(self, function: Callable[..., _Result], *, reads: Sequence[object] = ()) -> None:
        self._function = function
        self._reads = reads
        self._weights: Any = None
        self._num_moving = 0
        self._moving: dict[int, list[ref[Tensor]]] = {}
        self._version: Hashable = None
        self.replays: dict[Hashable, Callable[..., _Result] | None] = {}
        self.failed = False

    def __call__(self, key: Hashable, *arguments: Tensor, bucket: int = 0, version: Hashable = None) -> _Result:
        """Call the function.

        Args:
            key: all that decides which operators run.
            arguments: the function's.
            bucket: the width at which caches are read.
            version: differs whenever one of the objects has made its tensors again.
        """
        if self.failed or key not in self.replays:
            self.replays[key] = None
            return self._function(*arguments)
        moving = self._moving_tensors(bucket, version)
        replay = self.replays[key]
        if replay is None:
            try:
                replay = self.replays[key] = self._trace(arguments, moving)
            except _CANNOT as error:
                reason = str(error).strip().partition("\n")[0]
                _log.warning("going on without tracing: %s", reason)
                self.failed = True
                return self._function(*arguments)
        before = _is_optimizing()
        _set_optimizing(False)  # what `_without_optimizer` does, in less time
        try:
            return replay(*arguments, *moving)
        except BaseException as error:  # noqa: BLE001 - it is raised again
            raise take_error() or error from None
        finally:
            _set_optimizing(before)

    def _moving_tensors(self, bucket: int, version: Hashable) -> list[Tensor]:
        """What `allocate` has made, as it is read at this width.

        Only weak references are kept, so that a cache that is made again goes at once.
        """
        if version != self._version:
            self._moving.clear()
            self._version = version
        if bucket in self._moving:
            tensors = [reference() for reference in self._moving[bucket]]
            if not any([tensor is None for tensor in tensors]):  # noqa: C419 - a list is faster
                return tensors  # type: ignore[return-value]  # none of them is None
        weights, moving = find_tensors(self._reads, bucket=bucket)
        if self._weights is None or len(moving) != self._num_moving:
            self.replays = dict.fromkeys(self.replays)
            self._weights, self._num_moving = _holder(weights), len(moving)
        self._moving[bucket] = [ref(tensor) for tensor in moving]
        return moving

    def _trace(self, arguments: tuple[Tensor, ...], moving: Sequence[Tensor]) -> Callable[..., _Result]:
        """What `torch.jit.trace` does, but for what it keeps: torch would never let go of its traces."""
        inputs = *(argument.clone() for argument in arguments), *moving
        names = [f"input_{number}" for number in range(len(inputs))]
        with _one_at_a_time, recording(), warnings.catch_warnings(), _without_optimizer():
            warnings.simplefilter("ignore")  # of sizes that become constants, which the key answers for
            graph, _ = torch._C._create_graph_by_tracing(
                lambda *tensors: self._function(*tensors[: len(arguments)]),
                inputs, lambda _: "", True, False, self._weights, names,
            )  # fmt: skip
            _check_constants(graph)
            replay = torch._C._create_function_from_graph("replay", graph)
        return partial(replay, self._weights)


def find_tensors(roots: Sequence[object], *, bucket: int) -> tuple[list[Leaf], list[Tensor]]:
    """Find all tensors that objects hold, each once, in an order that depends on their structure alone.

    Args:
        roots: where to begin: models, drafters, verifiers, tensors.
        bucket: the width at which caches are read.

    Returns:
        Weights, which stay where they are, and tensors of each `Workspace`, which `allocate` may make again.
    """
    weights: list[Leaf] = []
    moving: list[Tensor] = []
    seen: set[int] = set()

    def visit(value: object, *, moves: bool) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor) and moves:
            moving.append(value)
        elif isinstance(value, Leaf):
            weights.append(value)
        else:
            for part in _parts(value, bucket=bucket):
                visit(part, moves=moves or isinstance(value, Workspace))

    visit(roots, moves=False)
    return weights, moving


def _parts(value: object, *, bucket: int) -> Iterable[object]:
    """What an object holds that may be or hold tensors."""
    if isinstance(value, PerBucket):
        return (value[bucket],)
    if isinstance(value, nn.Module):
        return (*value.parameters(), *value.buffers())
    if isinstance(value, dict):
        return tuple(value.values())
    if isinstance(value, list | tuple):
        return value
    is_code = isinstance(value, type | FunctionType | MethodType)
    if is_code or not hasattr(value, "__dict__") or type(value).__module__.startswith(_NOT_WALKED):
        return ()
    return tuple(vars(value).values())


def _holder(weights: Sequence[Leaf]) -> object:
    """What all traces of a function read, as torch's interpreter wants it."""
    module = torch._C.ScriptModule("Holder", torch._C.CompilationUnit(), False)  # type: ignore[call-arg]
    for number, leaf in enumerate(weights):
        module._register_attribute(f"weight_{number}", torch._C._jit_try_infer_type(leaf).type(), leaf)  # type: ignore[attr-defined]
    return module


def _check_constants(graph: Any) -> None:  # noqa: ANN401 - torch does not name its type
    """Refuse a trace that froze a tensor.

    Raises:
        RuntimeError: there is such a tensor, which may be another one, or elsewhere, when the trace is replayed.
    """
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t" and node.t("value").dim():
            shape = tuple(node.t("value").shape)
            raise RuntimeError(f"tracing would freeze a tensor of shape {shape} as a constant: pass it as an input")


@contextmanager
def _without_optimizer() -> Iterator[None]:
    """What an optimizer could find is not worth the time that it looks for it: some ten forwards."""
    before = _is_optimizing()
    _set_optimizing(False)
    try:
        yield
    finally:
        _set_optimizing(before)

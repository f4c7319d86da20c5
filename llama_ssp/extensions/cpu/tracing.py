"""Traces functions of tensors on the CPU once per shape, so that torch replays them without Python.

A small forward is a few hundred operators, and Python takes a third of its time to call them. torch's tracer records
the calls and its interpreter repeats them: the same kernels on the same numbers, so the same bits.

    calls of a shape    1st: from Python    2nd: traced, then replayed    3rd, 4th, ...: replayed

A trace of a round takes megabytes, so that the least recently used are dropped beyond `MOST`.

Every tensor that a function reads or writes must be an argument, or reachable from the objects passed to `Traced`:
their weights, which stay in place, and the tensors of their `allocate`, which may be replaced. Tracing runs the
function once more, on copies of the arguments; a tensor of the objects may only be written in a way that the replay
repeats.
"""

import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llama_ssp.extensions.cpu.sums import recording, take_error
from llama_ssp.models.graph_inputs import Leaf, find_tensors
from llama_ssp.types import LibraryPart

_Result = TypeVar("_Result", bound=Tensor | tuple[Tensor, ...])

MOST = 64
"""Functions of one kind whose traces are kept; tracing one again takes as long as some ten calls from Python."""

_log = logging.getLogger(__name__)
_one_at_a_time = Lock()
_is_optimizing, _set_optimizing = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize
_CANNOT = (RuntimeError, AttributeError, TypeError)  # an operator cannot be traced, or torch's private API has changed


class Traced(Generic[_Result]):
    """Traces of functions of one kind, each of which maps tensors to one or more tensors.

    Args:
        reads: objects whose tensors the functions read and write in addition to their arguments.

    Attributes:
        failed: whether tracing has failed once, so that functions are called from Python.
        replays: the replay by key, the most recently used last; None after the first call.
    """

    def __init__(self, *, reads: Sequence[object] = ()) -> None:
        self._reads = reads
        self._weights: Any = None
        self._num_moving = 0
        self._moving: dict[int, list[ref[Tensor]]] = {}
        self._version: Hashable = None
        self._made_version: Hashable = None
        self.replays: dict[Hashable, Callable[..., _Result] | None] = {}
        self.failed = False

    def __call__(
        self,
        function: Callable[..., _Result],
        key: Hashable,
        *arguments: Tensor,
        bucket: int = 0,
        version: Hashable = None,
    ) -> _Result:
        """Call a function with its arguments; `key` is everything that decides which operators run.

        `bucket` is the number of cache slots to read; `version` differs whenever an object has replaced its tensors.
        """
        if self.failed:
            return function(*arguments)
        if key not in self.replays:
            self.replays[key] = None
            if len(self.replays) > MOST:
                del self.replays[next(iter(self.replays))]
            return function(*arguments)
        moving = self._moving_tensors(bucket, version)
        if moving is None:
            return function(*arguments)
        self.replays[key] = known = self.replays.pop(key)
        before = _is_optimizing()
        _set_optimizing(False)  # its search takes as long as ten forwards and saves less
        try:
            replay = known or self._trace(function, key, arguments, moving)
            return replay(*arguments, *moving) if replay else function(*arguments)
        except BaseException as error:  # noqa: BLE001 - it is raised again
            raise take_error() or error from None
        finally:
            _set_optimizing(before)

    def _moving_tensors(self, bucket: int, version: Hashable) -> list[Tensor] | None:
        """Return the tensors of `allocate` for this bucket, kept as weak references so that a replaced cache is freed.

        Returns None if there are fewer than before: the first forward after an allocation makes the caches.
        """
        if version != self._version:
            self._moving.clear()
            self._version = version
        if bucket in self._moving:
            tensors = [reference() for reference in self._moving[bucket]]
            if not any([tensor is None for tensor in tensors]):  # noqa: C419 - a list is faster
                return tensors  # type: ignore[return-value]  # none is None
        weights, moving = find_tensors(self._reads, bucket=bucket)
        if len(moving) < self._num_moving and version != self._made_version:
            self._made_version = version
            return None
        if self._weights is None or len(moving) != self._num_moving:
            self.replays = dict.fromkeys(self.replays)
            self._moving.clear()
            self._weights, self._num_moving = _holder(weights), len(moving)
        self._moving[bucket] = [ref(tensor) for tensor in moving]
        return moving

    def _trace(
        self, function: Callable[..., _Result], key: Hashable, arguments: tuple[Tensor, ...], moving: Sequence[Tensor]
    ) -> Callable[..., _Result] | None:
        """Trace as `torch.jit.trace` does, except that the trace can be freed: torch keeps its own for ever.

        Returns None, after a warning, if an operator cannot be traced.
        """
        inputs = *(argument.clone() for argument in arguments), *moving
        names = [f"input_{number}" for number in range(len(inputs))]
        try:
            with _one_at_a_time, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about sizes that become constants: the key covers them
                graph = _on_short_stack(
                    torch._C._create_graph_by_tracing,
                    lambda *tensors: function(*tensors[: len(arguments)]),
                    inputs,
                    lambda _: "",
                    True,
                    False,
                    self._weights,
                    names,
                )
                _check_constants(graph)
                torch._C._jit_pass_constant_pooling(graph)  # type: ignore[attr-defined]  # frees two thirds of its nodes
                replay = torch._C._create_function_from_graph("replay", graph)
        except _CANNOT as error:
            _log.warning("continuing without tracing: %s", str(error).strip().partition("\n")[0])
            self.failed = True
            return None
        self.replays[key] = found = partial(replay, self._weights)
        return found


def _on_short_stack(trace: Callable[..., tuple[Any, object]], *arguments: object) -> LibraryPart:
    """Make a graph in a new thread with a short stack: torch stores the stack with each operator, 4 us a frame."""
    is_inference = torch.is_inference_mode_enabled()

    def make() -> LibraryPart:
        with torch.inference_mode(is_inference), recording(), _Recordable():
            return trace(*arguments)[0]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


_library = torch.library.Library("llama_ssp", "FRAGMENT")
_library.define("product(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.define("as_bits(Tensor values, ScalarType dtype) -> Tensor", "CONSERVATIVE")
_shape = Tensor.shape.__get__  # type: ignore[attr-defined]


class _Recordable(TorchFunctionMode):
    """Replaces operators that a trace cannot hold, and makes shapes constants, since the key of a trace covers them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func == _shape:
            return tuple(int(size) for size in func(*args))
        if func is Tensor.size:
            sizes = tuple(int(size) for size in args[0].shape)
            return sizes[args[1]] if args[1:] else sizes
        if func is Tensor.view and isinstance(args[1], torch.dtype):
            return torch.ops.llama_ssp.as_bits(*args)
        if func is torch.ops.mkldnn._linear_pointwise.default:
            return torch.ops.llama_ssp.product(*args[:3])
        return func(*args, **kwargs)


def _product(x_MI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """OneDNN's product on a packed weight, without the list argument that a trace cannot hold."""
    y_MO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_MI, packed, bias_O, "none", [], "")
    return y_MO


for _kind_of_weight in ("CPU", "MkldnnCPU"):
    _library.impl("product", _product, _kind_of_weight)
_library.impl("as_bits", lambda values, dtype: values.view(dtype), "CPU")


def _holder(weights: Sequence[Leaf]) -> object:
    """The weights that all traces of a function read, as a script module."""
    module = torch._C.ScriptModule("Holder", torch._C.CompilationUnit(), False)  # type: ignore[call-arg]
    for number, leaf in enumerate(weights):
        module._register_attribute(f"weight_{number}", torch._C._jit_try_infer_type(leaf).type(), leaf)  # type: ignore[attr-defined]
    return module


def _check_constants(graph: LibraryPart) -> None:
    """Raise RuntimeError for a trace that froze a tensor, which may have other values or another address at replay."""
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t" and node.t("value").dim():
            shape = tuple(node.t("value").shape)
            raise RuntimeError(f"tracing would freeze a tensor of shape {shape} as a constant: pass it as an input")

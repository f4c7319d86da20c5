"""Compares what replays read with what Python would read now: the same operators, addresses, offsets and shapes.

A graph replays addresses. So every stage is also run from Python before some of its replays. What its operators and
Triton's kernels get from outside is written down then, and while it is captured. The stub computes nothing, so this
changes no values.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from llama_ssp.speculate.engine.executors import GraphExecutor, Recorder
from llama_ssp.speculate.engine.round import Round, Stage
from llama_ssp.speculate.engine.state import BatchState

_T = TypeVar("_T")
_FIRST, _EVERY = range(2, 6), 12
"""The turns of a stage with its operators that are compared, and one of how many later ones."""
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Read(NamedTuple):
    """A tensor that a call reads, and that no call before it has made."""

    call: str
    address: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Reads(TorchDispatchMode):
    """Writes down what operators and kernels read while it is active, and what no graph may do.

    Attributes:
        found: in the order of the calls.
        problems: tensors of the host, and indices whose results have as many elements as values say.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Read] = []
        self.problems: set[str] = set()
        self._made: dict[int, Tensor] = {}  # keeps them, so that no other tensor gets their memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func._schema.name, _tensors((args, kwargs))
        if name in _INDEXING and any(index.dtype in {torch.bool, torch.uint8} for index in _tensors(args[1])):
            self.problems.add(f"{name} has an index of booleans")
        self._write(name, given)
        result = func(*args, **(kwargs or {}))
        addresses = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = {tensor.untyped_storage().data_ptr(): tensor for tensor in _tensors(result)}
        self._made |= {address: tensor for address, tensor in new.items() if address not in addresses}
        return result

    def launched(self, kernel: str, arguments: tuple[Any, ...]) -> None:
        """A kernel of Triton, which is no operator."""
        self._write(kernel, _tensors(arguments))

    def _write(self, call: str, given: list[Tensor]) -> None:
        for tensor in given:
            if not tensor.is_cuda:
                self.problems.add(f"{call} reads a tensor of the host of shape {tuple(tensor.shape)}")
            elif (address := tensor.untyped_storage().data_ptr()) not in self._made:
                place = int(tensor.storage_offset()), tuple(tensor.shape)
                self.found.append(Read(call, address, *place, tensor.dtype))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.numel()]


def _reads_of(piece: Callable[[], object]) -> _Reads:
    reads, run = _Reads(), JITFunction.run

    def launching(kernel: Any, *arguments: Any, **options: Any) -> Any:
        reads.launched(kernel.fn.__name__, arguments)
        return run(kernel, *arguments, **options)

    JITFunction.run = launching
    try:
        with reads:
            piece()
    finally:
        JITFunction.run = run
    return reads


class _ComparingRecorder(Recorder):
    """Captures, and writes down what is read meanwhile; replays compare that with `now`, if it is there.

    Attributes:
        name: of the stage that runs now.
        now: what Python has read in this turn.
    """

    def __init__(self, problems: set[str], **options: Any) -> None:
        self.num_forgotten = 0
        super().__init__(**options)
        self.name = ""
        self.now: _Reads | None = None
        self.num_compared, self.num_replayed = 0, 0
        self._problems = problems

    def forget(self) -> None:
        """See `Recorder`."""
        self.num_forgotten += 1
        super().forget()

    def record(
        self, piece: Callable[[], _T], put: Callable[[_T], _T] = lambda outputs: outputs
    ) -> tuple[_T, Callable[[], None]]:
        """See `Recorder`; what `put` reads is the graph's own."""
        made, reads = list[_T](), list[_Reads]()

        def read() -> _T:
            reads.append(_reads_of(lambda: made.append(piece())))
            return made[0]

        outputs, replay = super().record(read, put)
        [recorded] = reads
        made.clear()
        self._problems |= {f"{self.name}: {problem}" for problem in recorded.problems}

        def compared() -> None:
            self.num_replayed += 1
            if self.now is not None:
                self._compare(recorded.found, self.now.found)
            replay()

        return outputs, compared

    def _compare(self, recorded: list[Read], found: list[Read]) -> None:
        self.num_compared += 1
        for read, now in zip_longest(recorded, found):
            if read != now:
                self._problems.add(f"{self.name}: a replay reads {read}, and Python would read {now}")
                return


class ComparedGraphs(GraphExecutor):
    """Graphs whose replays are compared; `problems` gets a sentence for each fault.

    All ranks run a stage once more from Python in the same turns, whether it is a graph yet or not: its messages meet.
    """

    def __init__(self, round_: Round, problems: set[str]) -> None:
        self.recorder = _ComparingRecorder(problems, finish=round_.verifier.comm.finish)
        super().__init__(round_, recorder=self.recorder)
        self._turns: Counter[Hashable] = Counter()

    def run(self, stage: Stage, state: BatchState, *values: Any) -> Any:
        """See `Executor`."""
        self.recorder.name = stage.name
        turn = self._turns[stage.key]
        self._turns[stage.key] += 1
        is_compared = turn in _FIRST or turn % _EVERY == 0
        self.recorder.now = _reads_of(partial(stage.function, state, *values)) if is_compared else None
        return super().run(stage, state, *values)

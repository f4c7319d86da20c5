"""Which operators a call dispatches, how often, and how large their results are."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorCount(TorchDispatchMode):
    """Counts what reaches the dispatcher; kernels are operators that do not only view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.num_kernels = 0

    def __torch_dispatch__(self, func: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        self.num_kernels += not func.is_view
        return func(*args, **(kwargs or {}))


class OperatorSizes(OperatorCount):
    """Notes how many numbers each kernel's first result has."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: list[tuple[str, int]] = []

    def of(self, word: str) -> list[int]:
        """The sizes of results of the operators with a word in their names."""
        return [size for name, size in self._sizes if word in name]

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        sizes = [each.numel() for each in tree_leaves(made) if isinstance(each, Tensor)]
        self._sizes.append((str(func), sizes[0] if sizes else 0))
        return made


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [] if func.is_view else [each.nbytes for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return made

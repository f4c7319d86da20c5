"""Tensors that a stage of a round reads: weights, which stay in place, and workspaces, which `allocate` makes.

Executors need both lists: a trace takes the tensors of workspaces as arguments, and a CUDA graph is dropped when one of
them has been replaced.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Leaf = Tensor | torch.ScriptObject  # weights in a packed format of torch
_T = TypeVar("_T")
_NOT_WALKED = ("builtins", "torch", "transformers", "llama_ssp.settings", "llama_ssp.ranks")


class Workspace:
    """Base class of what `allocate` makes; unlike weights, its tensors are replaced by the next `allocate`."""


class PerBucket(dict[int, _T], Generic[_T]):
    """Caches values of `make` by bucket, None excepted: making a view costs as much as a copy, and buckets are few."""

    def __init__(self, make: Callable[[int], _T | None]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, bucket: int) -> _T | None:
        """Make the value of a bucket."""
        made = self._make(bucket)
        if made is not None:
            self[bucket] = made
        return made


class OwnBuckets(ABC):
    """Base class of what reads other buckets than the round; tracing follows it into objects that it holds."""

    @abstractmethod
    def own_bucket(self, bucket: int) -> int:
        """The bucket that its own cache is read at in a round that reads `bucket`."""


def find_tensors(roots: Sequence[object], *, bucket: int) -> tuple[list[Leaf], list[Tensor]]:
    """Find all tensors that objects hold, each once, in an order that depends only on the objects' structure.

    Returns weights, which stay in place, and tensors of each `Workspace`, which `allocate` may replace.
    """
    weights: list[Leaf] = []
    moving: list[Tensor] = []
    seen: set[int] = set()

    def visit(value: object, *, moves: bool, bucket: int) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, OwnBuckets):
            bucket = value.own_bucket(bucket)
        if isinstance(value, Tensor) and moves:
            moving.append(value)
        elif isinstance(value, Leaf):
            weights.append(value)
        else:
            for part in [value[bucket]] if isinstance(value, PerBucket) else _parts(value):
                visit(part, moves=moves or isinstance(value, Workspace), bucket=bucket)

    visit(roots, moves=False, bucket=bucket)
    return weights, moving


def _parts(value: object) -> Iterable[object]:
    """The members of an object that may be or hold tensors."""
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

"""Tensors that a stage of a round reads: weights, which stay in place, and workspaces, which `allocate` makes.

Executors need both lists: a trace takes the tensors of workspaces as arguments, and a CUDA graph is dropped when one of
them has been replaced. New weights are copied into the earlier ones' tensors, so that traces and graphs read them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Leaf = Tensor | torch.ScriptObject  # weights in a packed format of torch
_T = TypeVar("_T")
_NOT_WALKED = ("builtins", "torch", "transformers", "llama_ssp.settings", "llama_ssp.ranks")
_OF_ANY_MODULE = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}


class Workspace:
    """Base class of objects that `allocate` makes; unlike weights, its tensors are replaced by the next `allocate`."""


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
    """Base class of objects that read other buckets than the round; tracing also follows it into its members."""

    @abstractmethod
    def own_bucket(self, bucket: int) -> int:
        """Return the bucket of its own cache that it reads in a round that reads `bucket`."""


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
            for part in [value[bucket]] if isinstance(value, PerBucket) else [*_parts(value).values()]:
                visit(part, moves=moves or isinstance(value, Workspace), bucket=bucket)

    visit(roots, moves=False, bucket=bucket)
    return weights, moving


def find_parts(root: object, kind: type[_T], *, seen: set[int]) -> Iterator[_T]:
    """Yield the objects of a kind that an object holds, without the ones `seen`."""
    if id(root) not in seen:
        seen.add(id(root))
        if isinstance(root, kind):
            yield root
        for part in _parts(root).values():
            yield from find_parts(part, kind, seen=seen)


class InPlace:
    """Copies new weights into the tensors of a running model, part by part, as they are loaded.

    Attributes:
        model: the running model; None if there is none, and new parts are kept.
        fits: whether each part so far had the structure of the part that it replaces; kernels of CPUs depend on values.
    """

    def __init__(self, model: object) -> None:
        self.model: Any = model
        self.fits = model is not None

    def keep(self, new: _T, *path: str | int) -> _T:
        """Copy the tensors of a part into the part of `model` at this path, and return the part of `model`.

        Returns the new part if their structures differ, or if there is no model.
        """
        if self.model is None:
            return new
        old, pairs = self.model, list[tuple[Tensor, Tensor]]()
        for step in path:
            old = old[step] if isinstance(step, int) else getattr(old, step)
        if not _are_alike(new, old, pairs):
            self.fits = False
            return new
        for values, place in pairs:
            place.copy_(values)
        kept: _T = old
        return kept


NOWHERE = InPlace(None)


def _are_alike(new: Any, old: Any, pairs: list[tuple[Tensor, Tensor]]) -> bool:  # noqa: ANN401 - any objects
    """Whether two objects differ only in the values of their tensors, which are appended to `pairs`.

    Parts of `new` that are None are still to be made; functions are the same for one device and format.
    """
    if new is None or new is old:
        return True
    if type(new) is not type(old) or isinstance(new, torch.ScriptObject):
        return False
    if isinstance(new, Tensor):
        pairs.append((new, old))
        return (new.shape, new.dtype, new.device, new.layout) == (old.shape, old.dtype, old.device, old.layout)
    if isinstance(new, int | float | str | torch.dtype):
        return bool(new == old)
    found, before = _parts(new), _parts(old)
    return found.keys() <= before.keys() and all(_are_alike(part, before[name], pairs) for name, part in found.items())


def _parts(value: Any) -> dict[Any, object]:  # noqa: ANN401 - any object
    """The members of an object that may be or hold tensors, by name or number."""
    if isinstance(value, nn.Module):
        return {name: part for name, part in vars(value).items() if name not in _OF_ANY_MODULE}
    if isinstance(value, dict | list | tuple):
        return dict(value.items() if isinstance(value, dict) else enumerate(value))
    is_code = isinstance(value, type | FunctionType | MethodType)
    if is_code or not hasattr(value, "__dict__") or type(value).__module__.startswith(_NOT_WALKED):
        return {}
    found: dict[Any, object] = vars(value)
    return found

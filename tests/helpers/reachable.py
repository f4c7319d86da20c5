"""All tensors that an object leads to, also those that code holds: closures, default and partial arguments, hooks.

`llama_ssp.models.graph_inputs` follows members alone, so what an update of the weights must reach may be held by
nothing else.
"""

import gc
import threading
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

_NOT_FOLLOWED = (
    ModuleType,
    type,
    CodeType,
    FrameType,
    BuiltinFunctionType,
    str,
    int,
    float,
    torch.dtype,
    torch.device,
    threading.Thread,
)


def reachable_tensors(root: object) -> Iterator[Tensor]:
    """Each once, workspaces included. Globals of functions are not followed."""
    seen, left = set[int](), [root]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, _NOT_FOLLOWED):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, FunctionType):
            left += [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
        else:
            left += gc.get_referents(value)


def contents(root: object) -> set[tuple[Any, ...]]:
    """Dtype, shape and bytes of all tensors that an object leads to, other than those on the meta device."""
    found = set()
    for tensor in reachable_tensors(root):
        if not tensor.is_meta and tensor.numel():
            values = (tensor.to_dense() if tensor.is_mkldnn else tensor.detach()).contiguous()
            found.add((values.dtype, tuple(values.shape), values.view(-1).view(torch.uint8).numpy().tobytes()))
    return found

"""Fills an empty model with this rank's slices of its weights.

First every parameter is matched with a stored tensor by name and shape, so that a faulty checkpoint is reported before
a byte is loaded. Then one tensor at a time is read, cast and placed, so that host memory never holds more than the
rank's own slices and one tensor. Module `tensor_parallel` replaces modules by sharded ones.
"""

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from llama_ssp.errors import CheckpointError
from llama_ssp.models.tensor_parallel import LocalModule, Slice
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.prefetch import ReadAhead
from llama_ssp.weights.source import WeightSource

Progress = Callable[[int, int], None]
_LAYER = re.compile(r"\.([0-9]{1,9})\.")


def find_sources(model: PreTrainedModel, origin: WeightSource) -> dict[str, str]:
    """Find the stored name of each parameter of a whole model, before `tensor_parallel.shard`, in the model's order.

    Tied parameters share a source if only one is stored. CheckpointError if parameters are missing, have another shape,
    or are not floating-point numbers, or tensors of additional layers are stored.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored = _model_names(model, origin, parameters)
    _check_layers(origin, parameters, stored)
    ties: dict[str, str] = model.all_tied_weights_keys
    partners = ties | {source: target for target, source in ties.items()}
    sources = {name: stored.get(name) or stored.get(partners.get(name, "")) for name in parameters}
    missing = [name for name, source in sources.items() if source is None]
    if missing:
        raise CheckpointError(
            f"{origin.folder} lacks {len(missing)} of the {len(parameters)} tensors that its config.json calls for "
            f"({summary(missing)}): copy or download it again"
        )
    found = {name: source for name, source in sources.items() if source is not None}
    unfit = [
        f"{source} is {list(tensor.shape)}, not {list(parameters[name].shape)}"
        if tensor.shape != parameters[name].shape
        else f"{source} holds no floating-point numbers"
        for name, source in found.items()
        if (tensor := origin.tensors[source]).shape != parameters[name].shape or tensor.dtype is None
    ]
    if unfit:
        message = f"{origin.folder} does not fit its config.json, which may be another model's: {summary(unfit)}"
        raise CheckpointError(message)
    return found


def _check_layers(origin: WeightSource, parameters: Mapping[str, nn.Parameter], stored: Mapping[str, str]) -> None:
    """Reject stored tensors of layers that config.json lacks: named like a parameter, with another layer number."""
    known = {source for name, source in stored.items() if name in parameters}
    kinds = {_LAYER.sub(".0.", source, count=1) for source in known}
    numbers = {name: int(found[1]) for name in {*stored.values()} - known if (found := _LAYER.search(name))}
    strays = {name: number for name, number in numbers.items() if _LAYER.sub(".0.", name, count=1) in kinds}
    if strays:
        num_stored = 1 + max(strays.values())
        field = origin.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise CheckpointError(
            f"{origin.folder} holds tensors of {num_stored} layers ({summary(sorted(strays))}), and its config.json "
            f"has {field}={origin.shape.num_hidden_layers}: copy or download the config.json of these weights again"
        )


def _model_names(
    model: PreTrainedModel, origin: WeightSource, parameters: Mapping[str, nn.Parameter]
) -> dict[str, str]:
    """Stored name by the name that transformers gives the tensor in the model."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamed: dict[str, str] = {}
    for name in origin.tensors:
        new_name, conversion = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(parameters))
        if conversion is not None:
            message = f"{origin.folder} stores {name} in parts to be joined while loading, which is not supported"
            raise CheckpointError(message)
        renamed[new_name] = name
    return renamed


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WHILE_LOADING_BYTES, _AFTERWARDS_BYTES = 2**16, 2**25


@contextmanager
def returning_memory() -> Iterator[None]:
    """While weights are converted, return freed host memory to the system; with glibc only.

    Otherwise freed tensors leave holes in the heap that later tensors do not fit into, which add up to another copy of
    the model. Afterwards freed memory is kept, as glibc does by default, because activations reuse it.
    """
    _call_malloc("mallopt", _M_MMAP_THRESHOLD, _WHILE_LOADING_BYTES)
    try:
        yield
    finally:
        _call_malloc("malloc_trim", 0)
        _call_malloc("mallopt", _M_MMAP_THRESHOLD, _AFTERWARDS_BYTES)
        _call_malloc("mallopt", _M_TRIM_THRESHOLD, 2 * _AFTERWARDS_BYTES)


def _call_malloc(function: str, *arguments: int) -> None:
    """Call a function of glibc's allocator, if it is in use."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), function):
        getattr(library, function)(*arguments)


@dataclass(kw_only=True, eq=False)
class Weights:
    """Loads the parameters of a model, all at once or module by module, and moves the buffers.

    Loading module by module bounds memory for callers that convert the values.

    Attributes:
        model: with its sharded modules, parameters on the meta device.
        sources: from `find_sources` for the whole model.
        dtype, device: of the parameters; buffers keep their dtype.
        progress: called after each parameter with the bytes read so far and the total bytes.
        num_ahead: how many tensors are read ahead, by as many threads.
        places: the devices of modules that go elsewhere, by name.
    """

    model: PreTrainedModel
    origin: WeightSource
    sources: Mapping[str, str]
    dtype: torch.dtype
    device: torch.device
    progress: Progress | None
    num_ahead: int
    places: Mapping[str, torch.device]

    def __post_init__(self) -> None:
        self._waiting = dict(self.sources)
        self._uses = Counter(self.sources.values())
        self._tied: dict[_Piece, nn.Parameter] = {}
        # Of packed weights, the bytes that they had unpacked.
        self._sizes = {
            self._piece(name, source): getattr(*self._find(name)).numel() * self.dtype.itemsize
            for name, source in self.sources.items()
        }
        self._stored = ReadAhead(self._copy, list(self._sizes), num_ahead=self.num_ahead)
        self._total_bytes = sum(self._sizes.values())  # tied ones once
        self._done_bytes = 0
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))

    def fill(self, prefix: str = "") -> None:
        """Load the parameters whose names begin with `prefix`, in order; CheckpointError if a file has changed."""
        _call_malloc("malloc_trim", 0)
        for name in [name for name in self._waiting if name.startswith(prefix)]:
            module, leaf = self._find(name)
            setattr(module, leaf, self._read(self._piece(name, self._waiting.pop(name))))
            if self.progress:
                self.progress(self._done_bytes, self._total_bytes)

    def _find(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    def _piece(self, name: str, source: str) -> "_Piece":
        module, leaf = self._find(name)
        cut = module.slices.get(leaf) if isinstance(module, LocalModule) else None
        device = next((place for path, place in self.places.items() if name.startswith(f"{path}.")), self.device)
        return _Piece(source=source, cut=cut, device=device)

    def _read(self, piece: "_Piece") -> nn.Parameter:
        """Read a parameter; tied parameters on one device share it."""
        if piece in self._tied:
            return self._tied[piece]
        values = self._stored.take(piece)
        self._done_bytes += self._sizes[piece]
        parameter = nn.Parameter(values, requires_grad=False)
        if self._uses[piece.source] > 1:
            self._tied[piece] = parameter
        return parameter

    def _copy(self, piece: "_Piece") -> Tensor:
        """Copy a slice of a stored tensor to its device."""
        dim, parts = (piece.cut.dim, [piece.cut.part]) if piece.cut else (None, [])
        return self.origin.read(piece.source, dim=dim, parts=parts, dtype=self.dtype, device=piece.device)


class _Piece(NamedTuple):
    """A stored tensor or a slice of it, and its device."""

    source: str
    cut: Slice | None
    device: torch.device

"""Weights by a table: the stored name of each parameter, this rank's slice of it, its number format and its device.

    parameter   stored name        slice of this rank      device, number format
                `find_sources`     `Parameter.slice_of`    `StoredSlice`

Every parameter is matched with a stored tensor by name and shape first, so that a faulty checkpoint is reported before
a byte is loaded. Then each tensor is read once, cast and placed, as the model takes it.

Shapes: O outputs, I inputs.
"""

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import torch
from torch import Tensor, nn

from llama_ssp.architectures.matrices import FUSED, Cut, RankShard, WholeParts
from llama_ssp.architectures.mtp import num_mtp_layers
from llama_ssp.errors import CheckpointError
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.storage.stored import kept_format
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.source import WeightSource, storage_of
from llama_ssp.words import said
from llama_ssp.workspaces import InPlace

Progress = Callable[[int, int], None]
"""Takes the bytes read so far and the total bytes, after each parameter."""

_NO_PLACES: Mapping[str, nn.Parameter] = MappingProxyType({})
_READ_AHEAD = 2
"""Tensors that are read ahead, each by a thread."""
_LAYER = re.compile(r"\.([0-9]{1,9})\.")
_PASSED_OVER = re.compile(
    r"(?:^|\.)(?:mtp|vision|visual|audio|image|multi_modal|mm_|embed_vision|embed_audio)|^(?:d2t|t2d)$|^verifier_|^model\.confidence_head\."
    r"|\.rotary_emb\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$"
)
"""Stored tensors of parts that are known not to run, and those that follow from the config."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WHILE_LOADING_BYTES, _AFTERWARDS_BYTES = 2**16, 2**25


class Loading(TypedDict):
    """Keyword arguments of the functions that load a model.

    Attributes:
        dtype: of weights and cache; None for that of the origin. Buffers keep their dtype.
        progress: see `Progress`.
        precision: of the linear layers; they are quantized as they are read.
        whole: what each of several ranks holds whole; by default nothing.
        target: of a head: the model on this rank whose embedding it shares, if it has none, and both are alike.
        into: the model on this rank that gets these weights in place of those that it has.
    """

    dtype: torch.dtype | None
    progress: NotRequired[Progress | None]
    precision: NotRequired[Precision]
    whole: NotRequired[WholeParts]
    target: NotRequired[Runner | None]
    into: NotRequired[InPlace]


LINEAR, EXPERTS, OTHER = "linear", "experts", "other"
"""Roles of parameters: weights of linear layers, and of experts that are ours, may be stored packed."""


class Slice(NamedTuple):
    """This rank's parts of a parameter along one dimension, in order."""

    dim: int
    parts: tuple[range, ...]


class Parameter(NamedTuple):
    """One parameter of a whole model.

    Attributes:
        shape: as it is stored.
        role: one of the roles above.
        dim, units: the dimension that ranks share, and along which units; None for a parameter that each rank holds.
    """

    shape: tuple[int, ...]
    role: str = OTHER
    dim: int | None = None
    units: Cut | None = None

    def slice_of(self, shard: RankShard) -> Slice | None:
        """The part of one of several ranks; None for all of it."""
        if self.dim is None or self.units is None or shard.num_ranks == 1:
            return None
        return Slice(self.dim, shard.features(self.units, self.shape[self.dim]))


class StoredSlice(NamedTuple):
    """A row of the table: a stored tensor or a slice of it, its size, its number format, and its device.

    Equal rows are one tensor, as tied parameters are.
    """

    source: str
    cut: Slice | None
    num_elements: int
    dtype: torch.dtype | None
    device: torch.device


class ReadAhead:
    """Reads tensors ahead, for callers that take them mostly in the expected order.

    Args:
        read: reads the tensor of a key; also called from threads.
        keys: of all tensors, in the expected order.
        num_ahead: how many are read ahead, each by its own thread; 0 reads on demand.
    """

    def __init__(self, read: Callable[[Any], Tensor], keys: Sequence[Any], *, num_ahead: int) -> None:
        self._read = read
        self._next = dict(pairwise(keys))
        self._num_ahead = num_ahead
        self._pool = ThreadPoolExecutor(num_ahead, thread_name_prefix="read") if num_ahead else None
        self._wanted = set(keys)
        self._coming: dict[Any, Future[Tensor]] = {}

    def take(self, key: Any) -> Tensor:  # noqa: ANN401 - any hashable
        """Return a tensor, or raise what `read` raised in its thread; drop it, and start to read the next ones."""
        self._wanted.discard(key)
        coming = self._coming.pop(key, None)
        following = self._next.get(key)
        while self._pool and following is not None and len(self._coming) < self._num_ahead:
            if following in self._wanted and following not in self._coming:
                self._coming[following] = self._pool.submit(self._read, following)
            following = self._next.get(following)
        tensor = coming.result() if coming else self._read(key)
        if self._pool and not self._wanted:
            self._pool.shutdown()
        return tensor


class Weights:
    """The parameters of a model on this rank, which are taken one by one.

    Args:
        origin: of the values.
        rows: by parameter, in the order in which they will be taken; equal rows are read once.
        dtype: of the model, for the progress: packed weights count the bytes that they had unpacked.
        progress: called after each parameter.
        places: parameters that get the values, by name.
    """

    def __init__(
        self,
        origin: WeightSource,
        rows: Mapping[str, StoredSlice],
        *,
        dtype: torch.dtype,
        progress: Progress | None = None,
        places: Mapping[str, nn.Parameter] = _NO_PLACES,
    ) -> None:
        self._origin, self._rows, self._progress = origin, dict(rows), progress
        self._uses = Counter(rows.values())
        self._sizes = {row: row.num_elements * dtype.itemsize for row in self._uses}
        # A CPU quantizes with all its cores: reading ahead would take memory alone.
        num_ahead = _READ_AHEAD if any(row.device.type != "cpu" for row in self._uses) else 0
        self._stored = ReadAhead(self._read, list(self._sizes), num_ahead=num_ahead)
        self._tied: dict[StoredSlice, nn.Parameter] = {}
        self._places = {row: places[name] for name, row in rows.items() if name in places}
        self._done_bytes = 0

    def __contains__(self, name: str) -> bool:
        """Whether a parameter is still to be taken."""
        return name in self._rows

    def names(self, prefix: str) -> list[str]:
        """The parameters that are still to be taken whose names begin so."""
        return [name for name in self._rows if name.startswith(prefix)]

    def is_cut(self, name: str) -> bool:
        """Whether ranks share a parameter that is still to be taken."""
        return self._rows[name].cut is not None

    def take(self, name: str) -> nn.Parameter:
        """Read a parameter, and forget it; tied ones are one object. CheckpointError if a file has changed."""
        row = self._rows.pop(name)
        parameter = self._tied.get(row)
        if parameter is None:
            values = self._stored.take(row)
            if (place := self._places.get(row)) is not None and place.shape == values.shape:
                parameter = cast("nn.Parameter", place.copy_(values))
            else:
                parameter = nn.Parameter(values, requires_grad=False)
            self._done_bytes += self._sizes[row]
            if self._uses[row] > 1:
                self._tied[row] = parameter
        if self._progress:
            self._progress(self._done_bytes, sum(self._sizes.values()))
        return parameter

    def linear(self, *modules: str) -> tuple[Tensor, Tensor | None]:
        """Take the weights (O, I) and biases (O,) of linear layers with one input, joined by outputs."""
        return_freed()
        weights = [self.take(f"{module}.weight").detach() for module in modules]
        biases = [self.take(name).detach() for module in modules if (name := f"{module}.bias") in self]
        return _joined(weights), _joined(biases) if biases else None

    def _read(self, row: StoredSlice) -> Tensor:
        dim, parts = row.cut or (None, ())
        return self._origin.read(row.source, dim=dim, parts=parts, dtype=row.dtype, device=row.device)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate parts, and free each once it is copied."""
    if len(parts) == 1:
        return parts.pop()
    sizes = [len(part) for part in parts]
    whole = parts[0].new_empty(sum(sizes), *parts[0].shape[1:])
    for place in whole.split(sizes):
        place.copy_(parts.pop(0))
    return whole


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
        return_freed()
        _call_malloc("mallopt", _M_MMAP_THRESHOLD, _AFTERWARDS_BYTES)
        _call_malloc("mallopt", _M_TRIM_THRESHOLD, 2 * _AFTERWARDS_BYTES)


def return_freed() -> None:
    """Return the host memory that is free now."""
    _call_malloc("malloc_trim", 0)


def _call_malloc(function: str, *arguments: int) -> None:
    """Call a function of glibc's allocator, if it is in use."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), function):
        getattr(library, function)(*arguments)


@contextmanager
def config_errors(folder: Path) -> Iterator[None]:
    """CheckpointError for whatever a library raises meanwhile about the values of a config.json."""
    try:
        yield
    except Exception as error:  # values that only the model's code checks, such as names of functions
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        message = f"{folder}/config.json describes no model that can be built ({reason}): copy it again"
        raise CheckpointError(message) from error


def find_sources(
    table: Mapping[str, Parameter], origin: WeightSource, *, named: Mapping[str, str], ties: Mapping[str, str]
) -> dict[str, str]:
    """Find the stored name of each parameter of a whole model, in the order of its table.

    Args:
        table: of the whole model.
        origin: of the values.
        named: the stored names by the names that the model gives them.
        ties: parameters that are one tensor; they share a source if only one is stored.

    Raises:
        CheckpointError: parameters are missing, have another shape, or are not floating-point numbers, or tensors of
            additional layers are stored.
    """
    _check_layers(table, origin, named)
    partners = {**ties, **{source: target for target, source in ties.items()}}
    found = {name: source for name in table if (source := named.get(name) or named.get(partners.get(name, "")))}
    if missing := [name for name in table if name not in found]:
        others = [source for name, source in named.items() if name not in table]
        raise CheckpointError(
            f"{origin.folder} lacks {len(missing)} of the {len(table)} tensors that its config.json calls for "
            f"({summary(missing)}){f' and has others ({summary(others)})' if others else ''}: copy or download it again"
        )
    unfit = [
        f"{source} is {list(tensor.shape)}, not {list(table[name].shape)}"
        if tensor.shape != table[name].shape
        else f"{source} holds no floating-point numbers"
        for name, source in found.items()
        if (tensor := origin.tensors[source]).shape != table[name].shape or tensor.dtype is None
    ]
    if unfit:
        message = f"{origin.folder} does not fit its config.json, which may be another model's: {summary(unfit)}"
        raise CheckpointError(message)
    return found


def _check_layers(table: Mapping[str, Parameter], origin: WeightSource, named: Mapping[str, str]) -> None:
    """Reject stored tensors of layers that config.json lacks: named like a parameter, with another layer number.

    Those that predict further tokens may have the next numbers, and are not read.
    """
    known = {source for name, source in named.items() if name in table}
    kinds = {_LAYER.sub(".0.", source, count=1) for source in known}
    numbers = {name: int(found[1]) for name in {*named.values()} - known if (found := _LAYER.search(name))}
    strays = {
        name: number
        for name, number in numbers.items()
        if number not in _mtp_layers(origin) and _LAYER.sub(".0.", name, count=1) in kinds
    }
    if strays:
        num_stored = 1 + max(strays.values())
        field = origin.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise CheckpointError(
            f"{origin.folder} holds tensors of {num_stored} layers ({summary(sorted(strays))}), and its config.json "
            f"has {field}={origin.shape.num_hidden_layers}: copy or download the config.json of these weights again"
        )


def unread(origin: WeightSource, sources: Iterable[str], *, ignored: Iterable[str] = ()) -> list[str]:
    """The stored tensors that no parameter takes, except those of images, of further tokens, and of constants.

    `ignored` has patterns of others that the library leaves out.
    """
    known = [_PASSED_OVER, *map(re.compile, ignored)]
    return [
        name
        for name in sorted(origin.tensors.keys() - set(sources))
        if not any(pattern.search(name) for pattern in known)
        and not ((layer := _LAYER.search(name)) and int(layer[1]) in _mtp_layers(origin))
    ]


def _mtp_layers(origin: WeightSource) -> range:
    """The numbers of the layers that predict further tokens, which are stored with a model, and are not read."""
    first = origin.shape.num_hidden_layers
    return range(first, first + num_mtp_layers(lambda name: getattr(origin.config, name, None)))


def check_packed(
    table: Mapping[str, Parameter], origin: WeightSource, sources: Mapping[str, str], quantization: str
) -> frozenset[str]:
    """Check that weights which are stored packed belong to the layers that may be; returns those of others of them.

    ConfigError if `quantization` is another format; CheckpointError if others than linear layers of the decoder layers
    are packed, or only some of those with one input.
    """
    packed = {name for name, source in sources.items() if origin.tensors[source].storage}
    if not packed:
        return frozenset()
    assert kept_format(quantization, storage_of(origin), where=origin.folder) == quantization, (
        "given as the files have it"
    )
    layers = {name.removesuffix(".weight"): name in packed for name in table if table[name].role is LINEAR}
    of_one_input: dict[tuple[str, str], set[bool]] = {}
    for name, is_packed in layers.items():
        parent, _, leaf = name.rpartition(".")
        of_one_input.setdefault((parent, FUSED.get(leaf, leaf)), set()).add(is_packed)
    odd = [f"{parent}.{part}" for (parent, part), found in of_one_input.items() if len(found) > 1]
    odd += sorted(name for name in packed if table[name].role is OTHER)
    if odd:
        raise CheckpointError(
            f"{origin.folder} must hold {quantization} weights for linear layers and experts of the decoder layers "
            f"alone, and for all or none of those with one input, which is not so for {summary(odd)}: quantize the "
            f"original checkpoint with {said('model.quantization', quantization)}"
        )
    return frozenset(name for name, is_packed in layers.items() if not is_packed)

"""Weights by a table: the stored name of each parameter, this rank's slice of it, its number format and its device.

    parameter   stored name        slice of this rank      device, number format
                `Matched`          `Parameter.slice_of`    `StoredSlice`

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
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from llama_ssp.architectures.family import kept_whole
from llama_ssp.architectures.matrices import FUSED, Cut, RankShard, WholeParts, split_model
from llama_ssp.architectures.model_files import num_layers_ahead
from llama_ssp.errors import CheckpointError
from llama_ssp.models.cache import CachedRunner
from llama_ssp.models.graph_inputs import NOWHERE, InPlace
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.stages import WHOLE_MODEL, ModelStage
from llama_ssp.storage.stored import kept_format
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.source import WeightSource

Progress = Callable[[int, int], None]
"""Takes the bytes read so far and the total bytes, after each parameter."""

_AnyRunner = TypeVar("_AnyRunner", bound=CachedRunner)
_READ_AHEAD = 2
"""Tensors that are read ahead, each by a thread."""
_LAYER = re.compile(r"\.([0-9]{1,9})\.")
_PASSED_OVER = re.compile(
    r"(?:^|\.)(?:mtp|vision|visual|audio|image|multi_modal|mm_|embed_vision|embed_audio)|^(?:d2t|t2d)$|^verifier_"
    r"|\.rotary_emb\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$"
)
"""Stored tensors of parts that are known not to run, or that follow from the config."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WHILE_LOADING_BYTES, _AFTERWARDS_BYTES = 2**16, 2**25


@dataclass(frozen=True)
class Loading:
    """How a model is loaded: made once, and read by all code that loads it.

    Attributes:
        origin: the source of the values.
        label: the model's name in the log.
        device: the device of weights and cache.
        devices: for a target, this rank's device and the GPUs of its node that no rank uses; else empty.
        comm: the ranks that share the model, or its layers of a stage.
        stage: the stage of this rank.
        dtype: the dtype of weights and cache; None for the origin's. Stored buffers keep theirs.
        progress: see `Progress`.
        precision: how linear layers are stored; they are quantized as they are read.
        reproducible: whether to take operators whose bits do not depend on other rows, even if they are slower.
        whole: the parts that each of several ranks holds whole; by default none.
        target: for a head without an embedding, the model on this rank whose embedding it shares if both are alike.
        into: the model on this rank whose weights are replaced by these.
    """

    origin: WeightSource
    _: KW_ONLY
    label: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    devices: tuple[torch.device, ...] = ()
    comm: Comm = field(default_factory=Comm.single)
    stage: ModelStage = WHOLE_MODEL
    dtype: torch.dtype | None = None
    progress: Progress | None = None
    precision: Precision = UNQUANTIZED
    reproducible: bool = False
    whole: WholeParts = WholeParts.none
    target: Runner | None = None
    into: InPlace = NOWHERE

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype, by default the origin's."""
        return self.dtype or self.origin.dtype

    @property
    def kept_whole(self) -> WholeParts:
        """Parts that each of several ranks holds whole, including those that the family cannot cut."""
        return kept_whole(self.origin.shape, self.whole)

    @property
    def own_layers(self) -> range:
        """The layers of this rank's stage."""
        return self.stage.layers or range(self.origin.config.num_hidden_layers)

    @property
    def own_shard(self) -> RankShard:
        """The shard of this rank; PlacementError if there are too many ranks."""
        shape, quantization = self.origin.shape, self.precision.quantization
        shards = split_model(shape, num_ranks=self.comm.size, quantization=quantization, whole=self.kept_whole)
        return shards[self.comm.rank]

    def alike(self, kind: type[_AnyRunner]) -> _AnyRunner | None:
        """The target, if it is of this kind, on the same device and in the same dtype."""
        target: Any = self.target
        is_alike = isinstance(target, kind) and (target.device, target.dtype) == (self.device, self.weights_dtype)
        return target if is_alike else None


LINEAR, EXPERTS, OTHER = "linear", "experts", "other"
"""Roles of parameters: weights of linear layers, and of experts that are ours, may be stored packed."""


class Slice(NamedTuple):
    """This rank's parts of a parameter along one dimension, in order."""

    dim: int
    parts: tuple[range, ...]


class Parameter(NamedTuple):
    """One parameter of an unsplit model.

    Attributes:
        shape: its shape as stored.
        role: one of the roles above.
        dim, units: the dimension that is divided among ranks, and the units of that division; None for a parameter that
            each rank holds whole.
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

    Parameters with equal rows share one tensor, as tied parameters do.
    """

    source: str
    cut: Slice | None
    num_elements: int
    dtype: torch.dtype | None
    device: torch.device


class Weights:
    """The parameters of a model on this rank, which are taken one by one.

    Args:
        loading: the origin of the values. Its progress counts packed weights by the bytes that they had unpacked.
        rows: by parameter, in the order in which they will be taken; equal rows are read once.
        places: parameters that get the values, by name.
    """

    def __init__(
        self, loading: Loading, rows: Mapping[str, StoredSlice], *, places: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        self._origin, self._rows, self._progress = loading.origin, dict(rows), loading.progress
        self._uses = Counter(rows.values())
        self._sizes = {row: row.num_elements * loading.weights_dtype.itemsize for row in self._uses}
        # A CPU quantizes with all its cores: reading ahead would take memory alone.
        reads_ahead = any(row.device.type != "cpu" for row in self._uses)
        self._pool = ThreadPoolExecutor(_READ_AHEAD, thread_name_prefix="read") if reads_ahead else None
        self._wanted, self._coming = dict(self._sizes), dict[StoredSlice, Future[Tensor]]()
        self._tied: dict[StoredSlice, nn.Parameter] = {}
        self._places = {rows[name]: place for name, place in (places or {}).items() if name in rows}
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
            values = self._values(row)
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
        """Take weights (O, I) and biases (O,) of linear layers that have one input, joined along their outputs."""
        return_freed()
        weights = [self.take(f"{module}.weight").detach() for module in modules]
        biases = [self.take(name).detach() for module in modules if (name := f"{module}.bias") in self]
        return _joined(weights), _joined(biases) if biases else None

    def _values(self, row: StoredSlice) -> Tensor:
        """Return what a thread has read, or raise what it raised, or read it here; the next rows are read meanwhile."""
        del self._wanted[row]
        if not self._pool:
            return self._read(row)
        coming = self._coming.pop(row, None)
        for following in islice(self._wanted, _READ_AHEAD):
            if following not in self._coming:
                self._coming[following] = self._pool.submit(self._read, following)
        values = coming.result() if coming else self._read(row)
        if not self._wanted:
            self._pool.shutdown()
        return values

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


class Matched:
    """The parameters of an unsplit model, and the stored tensor of each: made once, and read by all code that needs it.

    Args:
        origin: the source of the values.
        table: the parameters of the unsplit model.
        named: the stored names by the names that the model gives them.
        ties: parameters that are one tensor; they share a source if only one is stored.

    Attributes:
        sources: the stored name of each parameter, in the order of the table.

    Raises:
        CheckpointError: parameters are missing, have another shape, or are not floating-point numbers, or tensors of
            additional layers are stored.
    """

    def __init__(
        self, origin: WeightSource, table: Mapping[str, Parameter], *, named: Mapping[str, str], ties: Mapping[str, str]
    ) -> None:
        self.origin, self.table = origin, table
        self._check_layers(named)
        partners = {**ties, **{source: target for target, source in ties.items()}}
        sources = {name: named.get(name) or named.get(partners.get(name, "")) for name in table}
        self.sources = self._found(sources, others=[source for name, source in named.items() if name not in table])

    @cached_property
    def _mtp_layers(self) -> range:
        """The numbers of MTP layers, which predict later tokens and are not read."""
        first = self.origin.shape.num_hidden_layers
        return range(first, first + num_layers_ahead(lambda name: getattr(self.origin.config, name, None)))

    def _found(self, sources: Mapping[str, str | None], *, others: Sequence[str]) -> dict[str, str]:
        """Return the stored name of each parameter; CheckpointError if one is missing or does not fit."""
        table, origin = self.table, self.origin
        found = {name: source for name, source in sources.items() if source}
        if missing := [name for name in table if name not in found]:
            raise CheckpointError(
                f"{origin.folder} lacks {len(missing)} of the {len(table)} tensors that its config.json calls for "
                f"({summary(missing)}){f' and has others ({summary(others)})' if others else ''}: copy or download it "
                "again"
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

    def _check_layers(self, named: Mapping[str, str]) -> None:
        """Reject stored tensors of layers that config.json lacks: named like a parameter, with another layer number."""
        known = {source for name, source in named.items() if name in self.table}
        kinds = {_LAYER.sub(".0.", source, count=1) for source in known}
        numbers = {name: int(found[1]) for name in {*named.values()} - known if (found := _LAYER.search(name))}
        strays = {
            name: number
            for name, number in numbers.items()
            if number not in self._mtp_layers and _LAYER.sub(".0.", name, count=1) in kinds
        }
        if strays:
            field = self.origin.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
            raise CheckpointError(
                f"{self.origin.folder} holds tensors of {1 + max(strays.values())} layers ({summary(sorted(strays))}), "
                f"and its config.json has {field}={self._mtp_layers.start}: copy or download the config.json of these "
                "weights again"
            )

    def unread(self, ignored: Iterable[str] = ()) -> list[str]:
        """Return the names of the stored tensors that no parameter takes.

        Left out are tensors that are known not to be needed: of vision and audio, of MTP layers, and constants that
        follow from the config.

        Args:
            ignored: patterns of the names of more tensors to leave out, as transformers lists them for the model.
        """
        known = [_PASSED_OVER, *map(re.compile, ignored)]
        return [
            name
            for name in sorted(self.origin.tensors.keys() - set(self.sources.values()))
            if not any(pattern.search(name) for pattern in known)
            and not ((layer := _LAYER.search(name)) and int(layer[1]) in self._mtp_layers)
        ]

    def check_packed(self, quantization: str) -> frozenset[str]:
        """Check that packed weights belong to layers that may be packed; returns the layers of other weights.

        ConfigError if `quantization` is another format; CheckpointError if weights outside the linear layers of decoder
        layers are packed, or only some layers with one input.
        """
        table, origin = self.table, self.origin
        packed = {name: kept for name, source in self.sources.items() if (kept := origin.tensors[source].storage)}
        if not packed:
            return frozenset()
        stored = kept_format(quantization, next(iter(packed.values())), where=origin.folder)
        assert stored == quantization, "given as the files have it"
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
                f"alone, and for all or none of those with one input, which is not so for {summary(odd)}: use an "
                "unquantized checkpoint"
            )
        return frozenset(name for name, is_packed in layers.items() if not is_packed)

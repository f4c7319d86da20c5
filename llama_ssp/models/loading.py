"""Loads this rank's part of a model: a table names each parameter's stored tensor, slice and device.

    parameter   stored name            slice of this rank           place     format
                `find_sources`         `tensor_parallel.Slice`      device    number format, then `Precision.kernel`

Every parameter is matched with a stored tensor by name and shape first, so that a faulty checkpoint is reported before
a byte is loaded. Then each tensor is read once, cast and placed, and quantized before the next ones are read, so that
host memory never holds more than the rank's own slices and a few tensors.

Modules `device_map` and `auto_tp` build targets that accelerate or DeepSpeed places.

Shapes: B sequences, T positions, I inputs, O outputs.
"""

import ctypes
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from llama_ssp.architectures.family import family_of, record_of
from llama_ssp.architectures.sharding import RankShard, cut_of, split_model
from llama_ssp.errors import CheckpointError, ConfigError, PlacementError
from llama_ssp.kernels.linear import BLOCK, COMPILED, Kernel, Linear, product_of
from llama_ssp.models.attention import BY_POSITION
from llama_ssp.models.huggingface.families import adapt, check_files, check_servable
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.llama.decoder import LeanRunner, is_llama_kind
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.tensor_parallel import (
    ColumnLinear,
    GatheredLinear,
    LocalModule,
    RowLinear,
    Slice,
    is_row_parallel,
    is_sharded,
    shard,
)  # fmt: skip
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.formats import NO_QUANTIZATION, format_of, formats
from llama_ssp.settings.schema import ModelShape, WholeParts
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.source import WeightSource

Progress = Callable[[int, int], None]
Key = TypeVar("Key", bound=Hashable)

READ_AHEAD = 2
"""Tensors that are read ahead, each by a thread."""
_LAYER = re.compile(r"\.([0-9]{1,9})\.")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WHILE_LOADING_BYTES, _AFTERWARDS_BYTES = 2**16, 2**25


class ReadAhead(Generic[Key]):
    """Reads tensors ahead, for callers that take them mostly in the expected order.

    Args:
        read: reads a tensor; also called from threads.
        keys: of all tensors, in the expected order.
        num_ahead: how many are read ahead, each by its own thread; 0 reads on demand.
    """

    def __init__(self, read: Callable[[Key], Tensor], keys: Sequence[Key], *, num_ahead: int) -> None:
        self._read = read
        self._next = dict(pairwise(keys))
        self._num_ahead = num_ahead
        self._pool = ThreadPoolExecutor(num_ahead, thread_name_prefix="read") if num_ahead else None
        self._wanted = set(keys)
        self._coming: dict[Key, Future[Tensor]] = {}

    def take(self, key: Key) -> Tensor:
        """Return a tensor, or raise what `read` raised in its thread; drop it, and start to read the next ones."""
        self._wanted.discard(key)
        coming = self._coming.pop(key, None)
        self._look_ahead(key)
        tensor = coming.result() if coming else self._read(key)
        if self._pool and not self._wanted:
            self._pool.shutdown()
        return tensor

    def _look_ahead(self, key: Key) -> None:
        following = self._next.get(key)
        while self._pool and following is not None and len(self._coming) < self._num_ahead:
            if following in self._wanted and following not in self._coming:
                self._coming[following] = self._pool.submit(self._read, following)
            following = self._next.get(following)


class Row(NamedTuple):
    """A row of the table: a stored tensor or a slice of it, and the device that it goes to."""

    source: str
    cut: Slice | None
    device: torch.device


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
        self._table = {name: self._row(name, source) for name, source in self.sources.items()}
        self._uses = Counter(self._table.values())
        # Of packed weights, the bytes that they had unpacked; tied ones once.
        self._sizes = {row: getattr(*self._find(name)).numel() * self.dtype.itemsize
                       for name, row in self._table.items()}  # fmt: skip
        self._stored = ReadAhead(self._read, list(self._sizes), num_ahead=self.num_ahead)
        self._tied: dict[Row, nn.Parameter] = {}
        self._done_bytes = 0
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))

    def fill(self, prefix: str = "") -> None:
        """Load the parameters whose names begin with `prefix`, in order; CheckpointError if a file has changed."""
        _call_malloc("malloc_trim", 0)
        for name in [name for name in self._table if name.startswith(prefix)]:
            row = self._table.pop(name)
            parameter = self._tied.get(row)
            if parameter is None:
                parameter = nn.Parameter(self._stored.take(row), requires_grad=False)
                self._done_bytes += self._sizes[row]
                if self._uses[row] > 1:
                    self._tied[row] = parameter
            module, leaf = self._find(name)
            setattr(module, leaf, parameter)
            if self.progress:
                self.progress(self._done_bytes, sum(self._sizes.values()))

    def _find(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    def _row(self, name: str, source: str) -> Row:
        module, leaf = self._find(name)
        cut = module.slices.get(leaf) if isinstance(module, LocalModule) else None
        device = next((place for path, place in self.places.items() if name.startswith(f"{path}.")), self.device)
        return Row(source=source, cut=cut, device=device)

    def _read(self, row: Row) -> Tensor:
        dim, parts = (row.cut.dim, [row.cut.part]) if row.cut else (None, [])
        return self.origin.read(row.source, dim=dim, parts=parts, dtype=self.dtype, device=row.device)


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


class Loading(TypedDict):
    """Keyword arguments of the functions that load a model.

    Attributes:
        dtype: of weights and cache; None for that of the origin.
        progress: called after each parameter with the bytes read so far and the total bytes.
        precision: of the linear layers; they are quantized as they are read.
        whole: what each of several ranks holds whole; by default nothing.
        fuses: see `LeanRunner`.
    """

    dtype: torch.dtype | None
    progress: NotRequired[Progress | None]
    precision: NotRequired[Precision]
    whole: NotRequired[WholeParts]
    fuses: NotRequired[bool]


def load_model(origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]) -> Runner:
    """Load this rank's slices of a model, in the lean decoder if that supports the family.

    Weights and cache are on `device`, and the ranks of `comm` share the model.

    Raises:
        CheckpointError: tensors are missing or have another shape, or a file has changed.
        ConfigError: the static cache cannot serve this model.
        PlacementError: the model cannot be split over these ranks.
    """
    model, weights = _prepare(origin, device=device, comm=comm, **loading)
    if is_llama_kind(model.config):
        with returning_memory():
            return LeanRunner(
                model, comm=comm, fill=weights.fill, precision=loading.get("precision", UNQUANTIZED),
                fuses=loading.get("fuses", False),
            )  # fmt: skip
    fill_modules(model, weights, loading)
    return ModuleRunner(model, comm=comm)


def load_modules(
    origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]
) -> PreTrainedModel:
    """Load this rank's slices of a model into the modules of transformers; see `load_model`."""
    model, weights = _prepare(origin, device=device, comm=comm, **loading)
    fill_modules(model, weights, loading)
    return model


def fill_modules(model: PreTrainedModel, weights: Weights, loading: Loading) -> None:
    """Fill the modules of transformers with weights in the given precision."""
    if quantize := loading.get("precision", UNQUANTIZED).kernel:
        with returning_memory():
            quantize_modules(model, quantize, fill=weights.fill)
    weights.fill()


def _prepare(
    origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]
) -> tuple[PreTrainedModel, Weights]:
    """Return this rank's empty model and its weights."""
    model = build_empty(origin)
    sources = find_sources(model, origin)
    quantization, whole = loading.get("precision", UNQUANTIZED).quantization, loading.get("whole", WholeParts.none)
    shard(model, origin.shape, comm, quantization=quantization, whole=whole)
    return model, weights_for(model, origin, sources, device, **loading)


def weights_for(
    model: PreTrainedModel,
    origin: WeightSource,
    sources: Mapping[str, str],
    device: torch.device,
    *,
    places: Mapping[str, torch.device] | None = None,
    **loading: Unpack[Loading],
) -> Weights:
    """Make the `Weights` of an empty model, and set the attention that the precision needs."""
    precision = loading.get("precision", UNQUANTIZED)
    check_packed(model, origin, sources, precision.quantization)
    if precision.rounds_inputs:
        model.config._attn_implementation = BY_POSITION[model.config._attn_implementation]
    dtype, progress = loading["dtype"] or origin.dtype, loading.get("progress")
    # On a CPU an unquantized weight is loaded once it is read: reading ahead would take memory alone.
    num_ahead = READ_AHEAD if precision.kernel or device.type != "cpu" else 0
    return Weights(
        model=model, origin=origin, sources=sources, places=places or {},
        dtype=dtype, device=device, progress=progress, num_ahead=num_ahead,
    )  # fmt: skip


def build_empty(origin: WeightSource) -> PreTrainedModel:
    """Build the whole model with parameters on the meta device and real buffers.

    CheckpointError if its config.json describes no model, ConfigError if the static cache cannot serve it.
    """
    # accelerate imports DeepSpeed if it is installed, which logs to standard output; that is reserved for texts.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    from accelerate import init_empty_weights  # noqa: PLC0415 - slow to import, and needed only here

    check_servable(origin.config)
    check_files(origin)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(origin.config)]
    config = deepcopy(origin.config)
    config._attn_implementation = record_of(origin.config.model_type).attention
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    try:
        with init_empty_weights():
            model: PreTrainedModel = model_class(config)
    except Exception as error:  # values that only the model's code checks, such as names of functions
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        message = f"{origin.folder}/config.json describes no model that can be built ({reason}): copy it again"
        raise CheckpointError(message) from error
    adapt(model)
    model.eval().requires_grad_(requires_grad=False)
    return model


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


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


class QuantizedLinear(nn.Module):
    """Replaces a linear layer of transformers, or this rank's slice of it, and empties it."""

    def __init__(self, module: nn.Linear | ColumnLinear | RowLinear, quantize: Kernel) -> None:
        super().__init__()
        weight_OI, bias_O = module.weight.detach(), module.bias
        del module.weight
        self._row = module if isinstance(module, RowLinear) else None
        self._form: Linear = quantize(weight_OI, None if self._row else bias_O)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the input (B, T, I), or this rank's part of it, to (B, T, O)."""
        y_BTO = self._form(x_BTI.flatten(0, -2)).unflatten(0, x_BTI.shape[:-1])
        return self._row.summed(y_BTO) if self._row else y_BTO


def quantize_modules(model: PreTrainedModel, quantize: Kernel, *, fill: Callable[[str], None]) -> None:
    """Quantize the linear layers of a sharded, empty model, one by one as `fill` loads them."""
    for name, module in list(_linear_layers(model)):
        fill(f"{name}.")
        model.set_submodule(name, QuantizedLinear(module, quantize))


def check_model(
    origin: WeightSource, *,
    num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none, compiles: bool = False,
) -> None:  # fmt: skip
    """Raise every error that `load_model` would raise, without loading weights; for `compiles` see `check_quantizable`.

    Raises:
        CheckpointError: tensors are missing or have another shape.
        ConfigError: the static cache cannot serve this model, or it cannot be quantized.
        PlacementError: the family is not supported, or cannot be split over these ranks in this precision.
    """
    family_of(origin.shape.model_type)
    split_model(origin.shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    model = build_empty(origin)
    check_packed(model, origin, find_sources(model, origin), quantization)
    check_quantizable(model, origin.shape, quantization, num_ranks=num_ranks, whole=whole, compiles=compiles)
    shard(model, origin.shape, Comm(rank=0, size=num_ranks), quantization=quantization, whole=whole)


def check_packed(model: PreTrainedModel, origin: WeightSource, sources: Mapping[str, str], quantization: str) -> None:
    """Check that weights which are stored packed belong to the layers that are quantized, and that all of those are.

    ConfigError if `quantization` is another format; CheckpointError if only some of the layers are packed.
    """
    packed = {name for name, source in sources.items() if origin.tensors[source].is_packed}
    if not packed:
        return
    if not format_of(quantization).reads_packed:
        able = ", ".join(storage.name for storage in formats().values() if storage.reads_packed)
        raise ConfigError(
            f"{origin.folder} holds weights of 4 bits, and model.quantization={quantization} was given: "
            f"model.quantization={able} (draft.model.quantization for a draft) is required"
        )
    odd = sorted(packed ^ {f"{name}.weight" for name, _ in _linear_layers(model)})
    if odd:
        raise CheckpointError(
            f"{origin.folder} must hold 4 bits for all linear layers of the decoder layers and for nothing else, which "
            f"is not so for {summary(odd)}: quantize the original checkpoint with model.quantization={quantization}"
        )


def check_quantizable(
    model: PreTrainedModel, shape: ModelShape, quantization: str,
    *,
    num_ranks: int, whole: WholeParts = WholeParts.none, compiles: bool = False,
) -> None:  # fmt: skip
    """Check that a whole model, before `tensor_parallel.shard`, can be quantized; reads no weights.

    `compiles` says that layers take compiled products where those fit, as on a CPU without `int8_threshold`.
    ConfigError if a package is missing that a layer needs; PlacementError if the inputs of a layer, or of a rank's
    slice of it, are no multiple of the format's group size.
    """
    storage = format_of(quantization)
    shards = split_model(shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    if (package := storage.package) and find_spec(package.name) is None:
        has_product = compiles and quantization in COMPILED and product_of(COMPILED[quantization]) is not None
        if not has_product or (odd := _of_no_whole_blocks(model, shards, whole)):
            where = f" for {summary(odd)}, whose sizes are no multiples of {BLOCK}" if has_product else ""
            raise ConfigError(
                f"quantization={quantization} needs the package {package.name}{where}: {package.install} installs it, "
                "or use quantization=int8_weight_only, which needs none"
            )
    for name, module in _linear_layers(model) if storage.group > 1 else ():
        is_cut = num_ranks > 1 and is_row_parallel(model, name, whole=whole)
        for width in {len(s.features(cut_of(name))) for s in shards} if is_cut else {module.in_features}:
            if width % storage.group:
                where = f" on one of {num_ranks} ranks" if is_cut else ""
                raise PlacementError(
                    f"{storage.name} packs {storage.group} inputs at a time, and {name} has {width}{where}: "
                    f"use {'another number of ranks, or ' if is_cut else ''}quantization=int8_weight_only"
                )


def _of_no_whole_blocks(model: PreTrainedModel, shards: Sequence[RankShard], whole: WholeParts) -> list[str]:
    """The linear layers that compiled products do not fit on some rank."""
    odd = []
    for name, module in _linear_layers(model):
        sizes = {module.weight.shape[0], module.weight.shape[1]}
        if len(shards) > 1 and is_sharded(model, name, whole=whole):
            sizes |= {len(shard.features(cut_of(name))) for shard in shards}
        if any(size % BLOCK for size in sizes):
            odd.append(name)
    return odd


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """All linear layers except the output head, whole or sharded, by name."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | ColumnLinear | RowLinear)
        if is_linear and module is not head and not isinstance(module, GatheredLinear):
            yield name, module

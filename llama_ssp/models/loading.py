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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from llama_ssp.architectures.family import check_ranks, check_servable, kept_whole, record_of
from llama_ssp.architectures.matrices import FUSED, Cut, check_inputs, cut_of, split_model
from llama_ssp.catalogue import ModelShape
from llama_ssp.cpu.kinds import BLOCK
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.kernels.linear import Kernel, Linear, make_linear, product_of
from llama_ssp.models.attention import BY_POSITION
from llama_ssp.models.huggingface.experts import OwnExperts, can_be_own, experts_of
from llama_ssp.models.huggingface.families import adapt, check_files, is_linear
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.llama.decoder import LeanRunner, is_llama_kind
from llama_ssp.models.llama.head import HeadRunner, build_modules
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.tensor_parallel import ColumnLinear, GatheredLinear, RowLinear, Slice, cut_dim, shard
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import WholeParts
from llama_ssp.storage.formats import NO_QUANTIZATION, format_of
from llama_ssp.storage.stored import kept_format
from llama_ssp.weights.checkpoint import num_mtp_layers, summary
from llama_ssp.weights.head import EMBEDDING, HeadSource
from llama_ssp.weights.source import WeightSource, packed_of, storage_of
from llama_ssp.words import said

Progress = Callable[[int, int], None]

_READ_AHEAD = 2
"""Tensors that are read ahead, each by a thread."""
_LAYER = re.compile(r"\.([0-9]{1,9})\.")
_PASSED_OVER = re.compile(
    r"(?:^|\.)(?:mtp|vision|visual|audio|image|multi_modal|mm_|embed_vision|embed_audio)|^(?:d2t|t2d)$|^verifier_"
    r"|\.rotary_emb\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$"
)
"""Stored tensors of parts that are known not to run, and those that follow from the config."""
_log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WHILE_LOADING_BYTES, _AFTERWARDS_BYTES = 2**16, 2**25


class Loading(TypedDict):
    """Keyword arguments of the functions that load a model.

    Attributes:
        dtype: of weights and cache; None for that of the origin. Buffers keep their dtype.
        progress: called after each parameter with the bytes read so far and the total bytes.
        precision: of the linear layers; they are quantized as they are read.
        whole: what each of several ranks holds whole; by default nothing.
        target: of a head: the model on this rank whose embedding it shares, if it has none, and both are alike.
    """

    dtype: torch.dtype | None
    progress: NotRequired[Progress | None]
    precision: NotRequired[Precision]
    whole: NotRequired[WholeParts]
    target: NotRequired[Runner | None]


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


class _Row(NamedTuple):
    """A row of the table: a stored tensor or a slice of it, its number format, and the device that it goes to."""

    source: str
    cut: Slice | None
    dtype: torch.dtype | None
    device: torch.device


class _Buffer(nn.Parameter):
    """A buffer that is stored like the parameters, in its own number format: the bias of a router's choice, a scale."""


class Weights:
    """Loads the parameters of a model, all at once or module by module, and moves the buffers.

    Loading module by module bounds memory for callers that convert the values. The attention becomes the one that the
    precision needs.

    Args:
        model: with its sharded modules, parameters on the meta device.
        origin: of the values.
        sources: from `find_sources` for the whole model.
        device: of parameters and buffers.
        places: the devices of modules that go elsewhere, by name.
        loading: see `Loading`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        origin: WeightSource,
        sources: Mapping[str, str],
        device: torch.device,
        *,
        places: Mapping[str, torch.device] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        precision = loading.get("precision", UNQUANTIZED)
        check_packed(model, origin, sources, precision.quantization)
        if precision.rounds_inputs:
            attention = model.config._attn_implementation
            if attention not in BY_POSITION:
                raise ConfigError(
                    f"{model.config.model_type} models have no attention that keeps the steps of rounded inputs: use "
                    f"{said('model.quantization', 'none')} or int8_weight_only"
                )
            model.config._attn_implementation = BY_POSITION[attention]
        self._model, self._origin, self.device, self._places = model, origin, device, places or {}
        self._dtype, self._progress = loading["dtype"] or origin.dtype, loading.get("progress")
        self._table = {name: self._row(name, source) for name, source in sources.items()}
        self._uses = Counter(self._table.values())
        # Of packed weights, the bytes that they had unpacked; tied ones once.
        self._sizes = {row: getattr(*self._find(name)).numel() * self._dtype.itemsize
                       for name, row in self._table.items()}  # fmt: skip
        # A CPU quantizes with all its cores: reading ahead would take memory alone.
        num_ahead = _READ_AHEAD if device.type != "cpu" else 0
        self._stored = ReadAhead(self._read, list(self._sizes), num_ahead=num_ahead)
        self._tied: dict[_Row, nn.Parameter] = {}
        self._done_bytes = 0
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))

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
            setattr(*self._find(name), parameter)
            if self._progress:
                self._progress(self._done_bytes, sum(self._sizes.values()))

    def _find(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._model.get_submodule(path), leaf

    def _row(self, name: str, source: str) -> _Row:
        module, leaf = self._find(name)
        slices: Mapping[str, Slice] = getattr(module, "slices", {})
        cut = slices.get(leaf)
        device = next((place for path, place in self._places.items() if name.startswith(f"{path}.")), self.device)
        dtype = None if isinstance(getattr(module, leaf), _Buffer) else self._dtype
        return _Row(source, cut, dtype, device)

    def _read(self, row: _Row) -> Tensor:
        dim, parts = (row.cut.dim, row.cut.parts) if row.cut else (None, [])
        return self._origin.read(row.source, dim=dim, parts=parts, dtype=row.dtype, device=row.device)


@contextmanager
def _returning_memory() -> Iterator[None]:
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


def load_model(
    origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]
) -> Runner | HeadRunner:
    """Load this rank's slices of a model, in the lean decoder if that supports the family.

    Weights and cache are on `device`, and the ranks of `comm` share the model.

    Raises:
        CheckpointError: tensors are missing or have another shape, or a file has changed.
        ConfigError: the static cache cannot serve this model.
        PlacementError: the model cannot be split over these ranks.
    """
    model, weights = _prepare(origin, device=device, comm=comm, **loading)
    if isinstance(origin, HeadSource):
        with _returning_memory():
            precision = loading.get("precision", UNQUANTIZED)
            return HeadRunner(model, origin, comm=comm, fill=weights.fill, precision=precision)
    if is_llama_kind(model.config):
        with _returning_memory():
            return LeanRunner(
                model, comm=comm, fill=weights.fill, precision=loading.get("precision", UNQUANTIZED),
            )  # fmt: skip
    on_cpu, precision = device.type == "cpu", loading.get("precision", UNQUANTIZED)
    fill_modules(model, weights, precision.kernel or (make_linear if on_cpu else None))
    if on_cpu:
        head: Any = model.get_output_embeddings()
        is_tied = head.weight is getattr(model.get_input_embeddings(), "weight", None)
        name = next(name for name, module in model.named_modules() if module is head)
        model.set_submodule(name, OwnLinear(head, partial(make_linear, keeps_weight=is_tied)))
    return ModuleRunner(model, comm=comm, cache_dtype=precision.cache_dtype)


def load_modules(
    origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]
) -> PreTrainedModel:
    """Load this rank's slices of a model into the modules of transformers; see `load_model`.

    Linear layers that are not quantized are the library's on a CPU too.
    """
    model, weights = _prepare(origin, device=device, comm=comm, **loading)
    fill_modules(model, weights, loading.get("precision", UNQUANTIZED).kernel)
    return model


def fill_modules(model: PreTrainedModel, weights: Weights, kernel: Kernel | None) -> None:
    """Fill the modules of transformers with weights, linear layers and experts one by one.

    The linear layers of a decoder layer, and of experts, get this kernel; None leaves them the library's.
    """
    if kernel:
        with _returning_memory():
            for name, module in list(_linear_layers(model)):
                weights.fill(f"{name}.")
                model.set_submodule(name, OwnLinear(module, kernel))
            for name, module in list(experts_of(model)):
                if can_be_own(module):
                    weights.fill(f"{name}.")
                    model.set_submodule(name, OwnExperts(module, kernel))
    weights.fill()


def _prepare(
    origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]
) -> tuple[PreTrainedModel, Weights]:
    """Return this rank's empty model and its weights."""
    model = build_empty(origin)
    sources = find_sources(model, origin)
    quantization = loading.get("precision", UNQUANTIZED).quantization
    whole = _whole_parts(origin, loading.get("whole", WholeParts.none))
    shard(model, origin.shape, comm, quantization=quantization, whole=whole)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sources = {name: source for name, source in sources.items() if name in parameters}  # some are other ranks' alone
    if shared := _shared_embedding(origin, loading, device):
        model.set_input_embeddings(shared)
        del sources[EMBEDDING]
    return model, Weights(model, origin, sources, device, **loading)


def _shared_embedding(origin: WeightSource, loading: Loading, device: torch.device) -> nn.Embedding | None:
    """The target's whole embedding, if this is a head without one, on its device and in its dtype."""
    target = loading.get("target")
    if not (origin.shape.shares_embedding and isinstance(target, LeanRunner)):
        return None
    is_alike = (target.device, target.dtype) == (device, loading["dtype"] or origin.dtype)
    return target.embedding if is_alike else None


def _whole_parts(origin: WeightSource, whole: WholeParts) -> WholeParts:
    """Parts that each rank holds whole: of a head at least the embedding, whose tokens are more than it drafts."""
    whole = kept_whole(origin.shape, whole)
    return WholeParts.embedding if isinstance(origin, HeadSource) and whole is WholeParts.none else whole


def build_empty(origin: WeightSource) -> PreTrainedModel:
    """Build the whole model with parameters on the meta device and real buffers.

    CheckpointError if its config.json describes no model, ConfigError if the static cache cannot serve it.
    """
    # accelerate imports DeepSpeed if it is installed, which logs to standard output; that is reserved for texts.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    from accelerate import init_empty_weights  # noqa: PLC0415 - slow to import, and needed only here

    check_servable(lambda name: getattr(origin.config, name, None))
    check_files(origin)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(origin.config)]
    config = deepcopy(origin.config)
    family = record_of(origin.config.model_type)
    has_sdpa = family.is_written or model_class._supports_sdpa
    config._attn_implementation = family.attention if has_sdpa else "eager"
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    try:
        with init_empty_weights(), _EmptyOnMeta():
            model: PreTrainedModel = build_modules(origin) if isinstance(origin, HeadSource) else model_class(config)
    except Exception as error:  # values that only the model's code checks, such as names of functions
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        message = f"{origin.folder}/config.json describes no model that can be built ({reason}): copy it again"
        raise CheckpointError(message) from error
    adapt(model)
    for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, leaf, _Buffer(getattr(module, leaf).to("meta"), requires_grad=False))
    model.eval().requires_grad_(requires_grad=False)
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Makes uninitialized tensors on the meta device at once: the experts of a layer may not fit in memory."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - of any function
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


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


def _unread(model: PreTrainedModel, origin: WeightSource, sources: Mapping[str, str]) -> list[str]:
    """The stored tensors that no parameter takes, except those of images, of further tokens, and of constants."""
    known = [_PASSED_OVER, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    first, last = origin.shape.num_hidden_layers, origin.shape.num_hidden_layers + num_mtp_layers(origin.config)
    return [
        name
        for name in sorted(origin.tensors.keys() - set(sources.values()))
        if not any(pattern.search(name) for pattern in known)
        and not ((layer := _LAYER.search(name)) and first <= int(layer[1]) < last)
    ]


def _check_layers(origin: WeightSource, parameters: Mapping[str, nn.Parameter], stored: Mapping[str, str]) -> None:
    """Reject stored tensors of layers that config.json lacks: named like a parameter, with another layer number.

    Those that predict further tokens may have the next numbers, and are not read.
    """
    known = {source for name, source in stored.items() if name in parameters}
    kinds = {_LAYER.sub(".0.", source, count=1) for source in known}
    numbers = {name: int(found[1]) for name in {*stored.values()} - known if (found := _LAYER.search(name))}
    num_layers = origin.shape.num_hidden_layers
    unread = range(num_layers, num_layers + num_mtp_layers(origin.config))
    strays = {
        name: number
        for name, number in numbers.items()
        if number not in unread and _LAYER.sub(".0.", name, count=1) in kinds
    }
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


class OwnLinear(nn.Module):
    """Replaces a linear layer of transformers, or this rank's slice of it, and empties it."""

    def __init__(self, module: nn.Linear | ColumnLinear | RowLinear, kernel: Kernel) -> None:
        super().__init__()
        weight_OI, bias_O = module.weight.detach(), module.bias
        del module.weight
        self._shared = module if isinstance(module, RowLinear | GatheredLinear) else None
        self._form: Linear = kernel(weight_OI, None if isinstance(module, RowLinear) else bias_O)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the input (B, T, I), or this rank's part of it, to (B, T, O)."""
        y_BTO = self._form(x_BTI.flatten(0, -2)).unflatten(0, x_BTI.shape[:-1])
        return self._shared.joined(y_BTO) if self._shared else y_BTO


def check_model(
    origin: WeightSource, *,
    num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none, compiles: bool = False,
) -> None:  # fmt: skip
    """Raise every error that `load_model` would raise, without loading weights.

    `compiles` says that layers take compiled products where those fit, as on a CPU.

    Raises:
        CheckpointError: tensors are missing or have another shape.
        ConfigError: the static cache cannot serve this model, or it cannot be quantized.
        PlacementError: the family is not supported, or cannot be split over these ranks in this precision.
    """
    whole = _whole_parts(origin, whole)
    split_model(origin.shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    model = build_empty(origin)
    check_ranks(origin.shape.model_type, num_ranks)
    sources = find_sources(model, origin)
    kept = check_packed(model, origin, sources, quantization)
    if unread := _unread(model, origin, sources):
        _log.warning("%s holds tensors that no module takes, which are not read: %s", origin.folder, summary(unread))
    packed, storage = packed_of(origin), format_of(quantization)
    group = (packed and packed.group) or storage.least_group
    check = partial(check_inputs, quantization, group=group, num_ranks=num_ranks, is_stored=packed is not None)
    _check_experts(model, origin.shape, quantization, num_ranks=num_ranks, check=check)
    _check_quantizable(
        model, origin.shape, quantization, num_ranks=num_ranks, whole=whole, compiles=compiles, kept=kept,
        check=check,
    )  # fmt: skip
    shard(model, origin.shape, Comm(rank=0, size=num_ranks), quantization=quantization, whole=whole)


def check_packed(
    model: PreTrainedModel, origin: WeightSource, sources: Mapping[str, str], quantization: str
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
    layers = {name: f"{name}.weight" in packed for name, _ in _linear_layers(model)}
    of_one_input: dict[tuple[str, str], set[bool]] = {}
    for name, is_packed in layers.items():
        parent, _, leaf = name.rpartition(".")
        of_one_input.setdefault((parent, FUSED.get(leaf, leaf)), set()).add(is_packed)
    odd = [f"{parent}.{part}" for (parent, part), found in of_one_input.items() if len(found) > 1]
    experts = {f"{name}.{part}" for name, module in experts_of(model) if can_be_own(module) for part in _OF_EXPERTS}
    odd += sorted(packed - {f"{name}.weight" for name in layers} - experts)
    if odd:
        raise CheckpointError(
            f"{origin.folder} must hold {quantization} weights for linear layers and experts of the decoder layers "
            f"alone, and for all or none of those with one input, which is not so for {summary(odd)}: quantize the "
            f"original checkpoint with {said('model.quantization', quantization)}"
        )
    return frozenset(name for name, is_packed in layers.items() if not is_packed)


def _check_experts(
    model: PreTrainedModel, shape: ModelShape, quantization: str, *, num_ranks: int, check: Callable[..., None]
) -> None:
    """Check that experts can be quantized; raises as `_check_quantizable`."""
    storage, model_type = format_of(quantization), model.config.model_type
    for name, module in experts_of(model) if storage.is_quantized else ():
        if not can_be_own(module):
            raise ConfigError(
                f"the experts of {model_type} models cannot be quantized ({name}): use "
                f"{said('model.quantization', 'none')}"
            )
        num_cut = 1 if shape.spreads_experts else num_ranks
        shards = split_model(shape, num_ranks=num_cut, quantization=quantization)
        width, units = (
            matrices.shape[2 - module.is_transposed] for matrices in (module.gate_up_proj, module.down_proj)
        )
        check(name, {width, *(each.num_features(Cut.mlp_units, units) for each in shards)}, is_cut=num_cut > 1)


def _check_quantizable(
    model: PreTrainedModel, shape: ModelShape, quantization: str, *, num_ranks: int, whole: WholeParts, compiles: bool,
    kept: Collection[str], check: Callable[..., None],
) -> None:  # fmt: skip
    """Check that a whole model, before `tensor_parallel.shard`, can be quantized, except for layers that are `kept`.

    ConfigError if a package is missing that a layer needs; PlacementError if the inputs of a layer, or of a rank's
    slice of it, are no multiple of the format's group size.
    """
    storage = format_of(quantization)
    shards = split_model(shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    layers = {name: layer for name, layer in _linear_layers(model) if name not in kept}
    cut_dims = {name: cut_dim(model, name, whole=whole) if num_ranks > 1 else None for name in layers}

    def sizes(name: str, dim: int) -> set[int]:
        """Those of a layer, or of its slices on all ranks."""
        if cut_dims[name] == dim:
            return {shard.num_features(cut_of(name), layers[name].weight.shape[dim]) for shard in shards}
        return {layers[name].weight.shape[dim]}

    if (package := storage.package) and find_spec(package.name) is None:
        has_product = compiles and storage.compiled is not None and product_of(storage.compiled) is not None
        odd = [name for name in layers if any(size % BLOCK for size in sizes(name, 0) | sizes(name, 1))]
        if odd or not has_product:
            where = f" for {summary(odd)}, whose sizes are no multiples of {BLOCK}" if has_product else ""
            raise ConfigError(
                f"quantization={quantization} needs the package {package.name}{where}: {package.install} installs it, "
                "or use quantization=int8_weight_only, which needs none"
            )
    for name in layers:
        check(name, sizes(name, 1), is_cut=cut_dims[name] == 1)


_OF_EXPERTS = ("gate_up_proj", "down_proj")
"""Tensors of a module of experts, all of them in each."""


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """All linear layers except the output head, whole or sharded, by name."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_sharded = isinstance(module, ColumnLinear | RowLinear)
        if (is_sharded or is_linear(name, module)) and module is not head and not isinstance(module, GatheredLinear):
            yield name, module

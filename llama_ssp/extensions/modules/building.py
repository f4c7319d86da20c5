"""The modules of transformers for families that run on them: built empty, sharded, and filled from a weight source.

Extensions build targets that libraries place from the same modules.

Shapes: B sequences, T positions, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from llama_ssp.architectures.family import check_servable, record_of
from llama_ssp.architectures.matrices import WholeParts
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.extensions.modules import texts
from llama_ssp.extensions.modules.attention import BY_POSITION
from llama_ssp.extensions.modules.experts import OwnExperts, can_be_own, experts_of
from llama_ssp.extensions.modules.families import adapt
from llama_ssp.extensions.modules.latents import projections, unpack
from llama_ssp.extensions.modules.stages import keep_stage
from llama_ssp.extensions.modules.tensor_parallel import (
    ColumnLinear,
    GatheredLinear,
    RowLinear,
    cut_dim,
    shard,
    units_of,
)
from llama_ssp.kernels.linear import Kernel, Linear
from llama_ssp.models.weights import (
    EXPERTS,
    LINEAR,
    Loading,
    Matched,
    Parameter,
    StoredSlice,
    Weights,
    config_errors,
    return_freed,
    returning_memory,
)
from llama_ssp.registry import imported
from llama_ssp.storage.formats import NO_QUANTIZATION, easiest_format
from llama_ssp.text.messages import said
from llama_ssp.types import LibraryPart
from llama_ssp.weights.source import WeightSource, tap_source


class _Buffer(nn.Parameter):
    """A buffer that is stored like the parameters, in its own number format: the bias of a router's choice, a scale."""


class _EmptyOnMeta(TorchFunctionMode):
    """Makes uninitialized tensors on the meta device at once, and zeros of three dimensions, as of Llama 4.

    The experts of a layer may not fit in memory.
    """

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - of any function
        is_empty = func is torch.empty or (func is torch.zeros and len(args) == 3)
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if is_empty else {}))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are built meanwhile have parameters on the meta device, and real buffers."""

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:  # noqa: ANN401 - torch's types
        return parameter if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(moved)
    try:
        with _EmptyOnMeta(), no_init_weights():
            yield
    finally:
        hook.remove()


def build_empty(origin: WeightSource) -> PreTrainedModel:
    """Build the whole model with parameters on the meta device and real buffers.

    CheckpointError if its config.json describes no model, ConfigError if the static cache cannot serve it.
    """
    check_servable(lambda name: getattr(origin.config, name, None))
    family = record_of(origin.config.model_type)
    if path := family.check_files:
        imported(path, setting=family.name)(origin)
    model_class: Any = texts.causal_class(type(origin.config))
    config = deepcopy(origin.config)
    has_sdpa = family.is_written or model_class._supports_sdpa
    config._attn_implementation = family.attention if has_sdpa else "eager"
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    with config_errors(origin.folder), _parameters_on_meta():
        model: PreTrainedModel = model_class(config)
        model.tie_weights(recompute_mapping=False)
        if head := tap_source(origin):
            head.extend(model)
    adapt(model)
    for name in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, leaf, _Buffer(getattr(module, leaf).to("meta"), requires_grad=False))
    model.eval().requires_grad_(requires_grad=False)
    return model


def table_of(
    model: PreTrainedModel, *, num_ranks: int = 1, whole: WholeParts = WholeParts.none
) -> dict[str, Parameter]:
    """Return a full model's parameters, before `tensor_parallel.shard`, and for linear layers how ranks cut them."""
    linears = dict(linear_layers(model))
    experts = {f"{name}.{part}" for name, module in experts_of(model) if can_be_own(module) for part in _OF_EXPERTS}

    def parameter(name: str, values: nn.Parameter) -> Parameter:
        if name in experts:
            return Parameter(tuple(values.shape), EXPERTS)
        if (layer := name.removesuffix(".weight")) not in linears or layer == name:
            return Parameter(tuple(values.shape))
        dim = cut_dim(model, layer, whole=whole) if num_ranks > 1 else None
        return Parameter(tuple(values.shape), LINEAR, dim, None if dim is None else units_of(model, layer))

    return {name: parameter(name, values) for name, values in model.named_parameters(remove_duplicate=False)}


def match_modules(
    origin: WeightSource, *, num_ranks: int = 1, whole: WholeParts = WholeParts.none
) -> tuple[PreTrainedModel, Matched]:
    """Build the whole model, and match its parameters with its files."""
    model = build_empty(origin)
    table = table_of(model, num_ranks=num_ranks, whole=whole)
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    named = {name: name for name in origin.tensors if name in table}
    for name in [name for name in origin.tensors if name not in table]:
        new_name, conversion = rename_source_key(name, renamings, converters, model.base_model_prefix, table)
        if conversion is not None:
            message = f"{origin.folder} stores {name} in parts to be joined while loading, which is not supported"
            raise CheckpointError(message)
        named[new_name] = name
    return model, Matched(origin, table, named=named, ties=model.all_tied_weights_keys)


def load_modules(
    loading: Loading, *, kernel: Kernel | None = None, tables: tuple[nn.Module, nn.Module] | None = None
) -> PreTrainedModel:
    """Load this rank's slices of a model into the modules of transformers; see `loading.load_model`.

    Linear layers that are not quantized get this kernel; None leaves them the library's. `tables` are the embedding and
    the output of another model, which this one shares.
    """
    model, matched = match_modules(loading.origin)
    matched.check_packed(loading.precision.quantization)
    shard(model, loading.origin.shape, loading.comm, own=loading.own_shard, whole=loading.kept_whole)
    if tables:
        model.set_input_embeddings(tables[0])
        model.set_submodule(name_of(model, model.get_output_embeddings()), SharedOutput(tables[1]))
    if loading.stage.num_stages > 1:
        path, layers = layers_of(model)
        keep_stage(model, loading, path=path, layers=layers, output=name_of(model, model.get_output_embeddings()))
    fill_modules(model, matched.sources, {"": loading.device}, loading.precision.kernel or kernel, loading)
    return model


def fill_modules(
    model: PreTrainedModel,
    sources: Mapping[str, str],
    devices: Mapping[str, torch.device],
    kernel: Kernel | None,
    loading: Loading,
) -> None:
    """Fill the modules of transformers with weights, cast their buffers, and move these to the first device.

    Linear layers and experts are filled one by one, which bounds memory where values are converted. The attention
    becomes the one that the precision needs.

    Args:
        model: the model with its sharded modules, and with parameters on the meta device.
        sources: the stored name of each parameter, without parameters that only other ranks hold.
        devices: devices of modules by name; the last one whose name fits counts.
        kernel: kernel of the linear layers of decoder layers, and of experts; None leaves them the library's.
        loading: the origin of the values, and how they are loaded.
    """
    if loading.precision.rounds_inputs:
        _attend_by_position(model)
    read, packing = projections(model), loading.precision.kernel
    owns: list[tuple[str, Any, Callable[[Any], nn.Module]]] = []
    if kernel:
        make_own_linear, make_experts = partial(OwnLinear, kernel=kernel), partial(OwnExperts, kernel=kernel)
        owns += [(name, module, make_own_linear) for name, module in linear_layers(model) if name not in read]
        owns += [(name, module, make_experts) for name, module in experts_of(model) if can_be_own(module)]
    if packing:
        make_plain = partial(unpack, kernel=packing, dtype=loading.weights_dtype)
        owns += [(name, model.get_submodule(name), partial(make_plain, num_inputs=read[name])) for name in read]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = [f"{name}.{leaf}" for name, module, _ in owns for leaf, _ in module.named_parameters()]
    rows = {}
    for name in dict.fromkeys([*first, *parameters]):
        if not (parameter := parameters[name]).is_meta:
            continue  # tables of another model are filled
        path, _, leaf = name.rpartition(".")
        cut = getattr(model.get_submodule(path), "slices", {}).get(leaf)
        device = [place for module, place in devices.items() if not module or name.startswith(f"{module}.")][-1]
        dtype = None if isinstance(parameter, _Buffer) else loading.weights_dtype
        rows[name] = StoredSlice(sources[name], cut, parameter.numel(), dtype, device)
    into = loading.into
    weights = Weights(loading, rows, places=into.model.parameters if into.model else {})
    # Built in the dtype of the weights: buffers that meet activations have it, and rotary frequencies are in fp32.
    with torch.device("meta"), local_torch_dtype(loading.weights_dtype), no_init_weights():
        alike = type(model)(deepcopy(loading.origin.config))
    dtypes = {name: buffer.dtype for name, buffer in alike.named_buffers()}
    for name, buffer in list(model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, buffer.to(next(iter(devices.values())), dtypes.get(name)))

    def fill(prefix: str) -> None:
        return_freed()
        for name in weights.names(prefix):
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, weights.take(name))

    with returning_memory():
        for name, module, make_own in owns:
            fill(f"{name}.")
            model.set_submodule(name, into.keep(make_own(module), "_model", *name.split(".")))
    fill("")


def _attend_by_position(model: PreTrainedModel) -> None:
    """Choose the attention that keeps the bits of single steps; ConfigError if there is none."""
    attention = model.config._attn_implementation
    if attention not in BY_POSITION:
        raise ConfigError(
            f"{model.config.model_type} models have no attention that keeps the steps of rounded inputs: use "
            f"{said('model.quantization', ' or '.join(dict.fromkeys([NO_QUANTIZATION, easiest_format()])))}"
        )
    model.config._attn_implementation = BY_POSITION[attention]


def name_of(model: PreTrainedModel, module: nn.Module) -> str:
    """The name of a module, such as the one that makes logits."""
    found: str = next(name for name, each in model.named_modules() if each is module)
    return found


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder layers and their name: the first list of modules."""
    return next((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


class SharedOutput(nn.Module):
    """The output of another model, without the forward hooks of that model."""

    def __init__(self, module: LibraryPart) -> None:
        super().__init__()
        # A tuple, since a module would become a part of this one.
        self._held = module.forward, getattr(module, "shared", None) or module

    @property
    def shared(self) -> LibraryPart:
        """See `OwnLinear`."""
        return self._held[1]

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Map hidden states (B, T, E) to logits."""
        logits: Tensor = self._held[0](x_BTE)
        return logits


class OwnLinear(nn.Module):
    """Takes the place of a linear layer of transformers, or of this rank's slice of one.

    The replaced module loses its weight, which this one keeps in its own form.

    Attributes:
        shared: the replaced slice, if outputs have to be summed or gathered over ranks after the product; else None.
    """

    def __init__(self, module: nn.Linear | ColumnLinear | RowLinear, kernel: Kernel) -> None:
        super().__init__()
        weight_OI, bias_O = module.weight.detach(), module.bias
        del module.weight
        self.shared = module if isinstance(module, RowLinear | GatheredLinear) else None
        self._form: Linear = kernel(weight_OI, None if isinstance(module, RowLinear) else bias_O)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the input (B, T, I), or this rank's part of it, to (B, T, O)."""
        y_BTO = self._form(x_BTI.flatten(0, -2)).unflatten(0, x_BTI.shape[:-1])
        return self.shared.joined(y_BTO) if self.shared else y_BTO


_OF_EXPERTS = ("gate_up_proj", "down_proj")
"""Names of the tensors of a module of experts; each holds all experts."""


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """All linear layers except the output head, whole or sharded, by name."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_sharded = isinstance(module, ColumnLinear | RowLinear)
        if (is_sharded or is_linear(name, module)) and module is not head and not isinstance(module, GatheredLinear):
            yield name, module


def is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer and no router, since some routers have their own forward, or are read."""
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_plain and not name.endswith((".router.proj", ".router.classifier", ".gate.wg"))

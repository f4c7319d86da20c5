"""Builds the runner of this rank from a weight source, for tensor-parallel and whole models.

Modules `device_map` and `auto_tp` build targets that accelerate or DeepSpeed places.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from llama_ssp.architectures.family import family_of, record_of
from llama_ssp.architectures.sharding import split_model
from llama_ssp.config.formats import NO_QUANTIZATION
from llama_ssp.config.schema import WholeParts
from llama_ssp.distributed.comms import Comm
from llama_ssp.errors import CheckpointError
from llama_ssp.models.attention import BY_POSITION
from llama_ssp.models.huggingface.families import adapt, check_files, check_servable
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.llama.decoder import LeanRunner, is_llama_kind
from llama_ssp.models.loader import Progress, Weights, find_sources, returning_memory
from llama_ssp.models.quantization.modules import check_packed, check_quantizable, quantize_modules
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.tensor_parallel import shard
from llama_ssp.weights.source import WeightSource

READ_AHEAD = 2
"""Tensors that are read ahead, each by a thread."""


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
    # On a CPU the kernels of unquantized layers are timed while loading, so no thread may read ahead meanwhile.
    num_ahead = READ_AHEAD if precision.kernel or device.type != "cpu" else 0
    return Weights(
        model=model, origin=origin, sources=sources, places=places or {},
        dtype=dtype, device=device, progress=progress, num_ahead=num_ahead,
    )  # fmt: skip

"""A model of transformers that is in memory already, as a weight source."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from llama_ssp.architectures.family import record_of
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError
from llama_ssp.weights.checkpoint import shape_of
from llama_ssp.weights.source import TensorFacts, Wanted, WeightSource

_WRAPPED = re.compile(r"^module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
"""Parts of a name that torch adds for DistributedDataParallel, `torch.compile` and FSDP."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightsInMemory:
    """The parameters and the stored buffers of a model; see `WeightSource`."""

    name: str  # for reports.
    folder: Path  # where the model came from, if that was a folder.
    config: PretrainedConfig
    shape: ModelShape
    parameters: Mapping[str, Tensor]  # by name, tied ones once.
    generation: Mapping[str, Any]  # the fields of its generation config.
    context = property(attrgetter("shape.max_position_embeddings"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the tensors."""
        return Counter(values.dtype for values in self.parameters.values()).most_common(1)[0][0]

    @cached_property
    def tensors(self) -> dict[str, TensorFacts]:
        """See `WeightSource`."""
        return {
            name: TensorFacts(dtype=values.dtype if values.is_floating_point() else None, shape=tuple(values.shape))
            for name, values in self.parameters.items()
        }

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """Copy a tensor or a slice of it; see `WeightSource.read`."""
        values, dim = self.parameters[name].detach(), wanted.get("dim")
        if dim is not None:
            values = torch.cat([values.narrow(dim, part.start, len(part)) for part in wanted["parts"]], dim=dim)
        dtype, device = wanted.get("dtype") or values.dtype, wanted.get("device") or torch.device("cpu")
        return values.to(device, dtype, copy=True, memory_format=torch.contiguous_format)


def weights_of(model: nn.Module, *, what: str) -> WeightsInMemory:
    """The weights of a loaded causal language model; raises ConfigError for any other. `what` is target or draft."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) else model
    kind = type(model).__name__
    causal: Any = ()
    if isinstance(model, PreTrainedModel):
        causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    if not isinstance(model, PreTrainedModel) or not isinstance(model, causal):
        wanted = "a causal language model of transformers, such as LlamaForCausalLM, is required"
        raise ConfigError(f"{what} is a loaded {kind}, and {wanted}")
    stored, buffers = model.state_dict().keys(), dict(model.named_buffers())
    parameters = dict(model.named_parameters()) | {name: buffers[name] for name in stored & buffers.keys()}
    if getattr(model.config, "quantization_config", None) is not None or getattr(model, "peft_config", None):
        raise ConfigError(f"{what} is a loaded {kind} with quantized weights or adapters: give the model without them")
    if any(values.is_meta for values in parameters.values()):
        raise ConfigError(f"{what} is a loaded {kind} whose weights are not all in memory: load it without offload")
    path, config = str(model.name_or_path), deepcopy(model.config)
    config.update({"dtype": model.dtype})  # which `save_pretrained` leaves as a string
    return WeightsInMemory(
        name=Path(path).name or kind,
        folder=Path(path or kind),
        config=config,
        shape=shape_of(config),
        parameters=_named(parameters, config),
        generation=model.generation_config.to_dict(),
    )


def check_tensors(parameters: Mapping[str, Any], *, what: str) -> None:
    """Raise ConfigError for anything but tensors by name that are in memory."""
    if odd := [name for name, values in parameters.items() if not isinstance(values, Tensor)]:
        raise ConfigError(f"{what} must be tensors by name, as of state_dict(), and {odd[0]!r:.60} has none")
    if empty := [name for name, values in parameters.items() if values.is_meta]:
        raise ConfigError(
            f"{what} must be tensors in memory, and {empty[0]!r:.60} is on the meta device, which holds no values: "
            "give weights that are loaded"
        )


def _named(parameters: Mapping[str, Any], config: PretrainedConfig) -> Mapping[str, Any]:
    """Tensors by the names that the model itself gives them, with outputs before inputs."""
    found = {_WRAPPED.sub("", name): values for name, values in parameters.items()}
    named, ends = found if len(found) == len(parameters) else parameters, record_of(config.model_type).turned
    return {name: values.t() if name.endswith(ends) and values.ndim == 2 else values for name, values in named.items()}


def weights_like(running: WeightSource, parameters: Mapping[str, Any], *, what: str) -> WeightsInMemory:
    """Tensors by name as other weights of a model; ConfigError for anything else. `what` is model or draft."""
    check_tensors(parameters, what=what)
    return WeightsInMemory(
        name=what,
        folder=Path(f"{what}={{...}}"),
        config=running.config,
        shape=running.shape,
        parameters=_named(parameters, running.config),
        generation={},
    )


def kept(origin: WeightSource, names: Callable[[], Collection[str]] | None = None) -> WeightSource:
    """A source whose tensors of these names, or all, stay as they are now: copies of the ones in memory.

    Files stay files. Of weights in memory the other tensors keep no values, so that their memory can be freed.
    """
    if not isinstance(origin, WeightsInMemory):
        return origin
    copied = origin.parameters.keys() if names is None else names()
    return replace(
        origin,
        parameters={
            name: values.detach().to("cpu", copy=True) if name in copied else values.detach().to("meta")
            for name, values in origin.parameters.items()
        },
    )


def as_eos_ids(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a text, of a generation config that names none, one or several."""
    return () if given is None else (given,) if isinstance(given, int) else tuple(given)

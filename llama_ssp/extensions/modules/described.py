"""The modules of a model by transformers, on the meta device, which a plan counts for a family without a record."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from llama_ssp.architectures.family import record_of, with_slots
from llama_ssp.architectures.matrices import Inventory, KeptStates, Matrix, WholeParts, joined
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import PlacementError
from llama_ssp.extensions.modules.building import build_empty, is_linear
from llama_ssp.extensions.modules.experts import experts_of
from llama_ssp.extensions.modules.latents import projections
from llama_ssp.extensions.modules.layers import layer_of
from llama_ssp.extensions.modules.recurrent import mixers_of, shared_heads, state_of
from llama_ssp.extensions.modules.tensor_parallel import RECURRENT, cut_dim
from llama_ssp.types import LibraryPart
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.source import WeightSource

_Origin = TypeVar("_Origin", bound=WeightSource)

_LAYER = re.compile(r"\.\d+\.")
_IN_LAYER = re.compile(r"\.\d+\.(?:(?!self_attn\.gate_proj|attn\.c_)\w+\.(?=.*\.))?")
"""The prefix of the name of a module's parameter within a layer, with the name of the layer's part if it has parts."""
_OUTSIDE = -1
"""The layer number of parameters outside of all layers."""


def describe(folder: Path) -> ModelShape:
    """The sizes of a model, with its modules, from its config.json alone; raises what a run on one rank would."""
    return with_modules(inspect(folder, config_alone=True)).shape


def with_modules(origin: _Origin) -> _Origin:
    """A checkpoint, or an MTP head, whose shape has the modules of its model."""
    shape = replace(origin.shape, modules=modules_of(build_empty(origin), origin.shape))
    return replace(cast("Any", origin), shape=shape)  # type: ignore[no-any-return]


def modules_of(model: PreTrainedModel, shape: ModelShape) -> Inventory:
    """List the parameters of a whole model without weights.

    The matrices of a layer are its linear layers' and experts' weights, and its vectors everything else.
    """
    head, numbers = model.get_output_embeddings(), range(shape.num_hidden_layers)
    is_tied = bool(model.config.tie_word_embeddings)
    layers, embeddings, vectors = [Counter[Matrix]() for _ in numbers], list[Matrix](), Counter[int]()
    cuts = dict[tuple[str, bool], int | None]()
    output, experts = None, dict(experts_of(model))
    shared_heads, plain = _heads_of_modules(model), projections(model)
    for name, module in model.named_modules():
        is_inner = _IN_LAYER.search(f"{name}.")
        number = int(is_inner[0].split(".")[1]) if is_inner else _OUTSIDE
        for leaf, parameter in module.named_parameters(recurse=False):
            kind = _LAYER.sub(".*.", f"{name}.", count=1), name in shared_heads
            if kind not in cuts:
                cuts[kind] = _cut_of(model, name, module)
            cut = cuts[kind]
            if is_inner and name in experts and parameter.dim() == 3:
                num_copies, *sizes = parameter.shape
                rows, columns = sizes[::-1] if getattr(module, "is_transposed", False) else sizes
                cut = None if cut is None else int(leaf.startswith("down"))
                found = Matrix(
                    module=f"experts.{leaf}",
                    num_rows=rows,
                    num_columns=columns,
                    cut=cut,
                    num_chosen=1,
                    name=f"{kind[0]}{leaf}",
                )
                layers[number][found] += num_copies
            elif leaf == "weight" and (is_linear(name, module) or isinstance(module, nn.Embedding)):
                rows, columns = parameter.shape
                short = _IN_LAYER.split(f"{name}.weight")[-1].removesuffix(".weight")
                if num_units := shared_heads.get(name, 0):
                    cut = int(name.endswith(("out_proj", ".o_proj")))
                found = Matrix(
                    module=short if is_inner else short.rpartition(".")[2],
                    num_rows=rows,
                    num_columns=columns,
                    cut=cut,
                    num_units=num_units,
                    is_plain=name in plain,
                    name=kind[0].removesuffix(".") * bool(is_inner),
                )
                if is_inner:
                    layers[number][found] += 1
                elif isinstance(module, nn.Embedding):
                    embeddings.append(found)
                elif module is head:
                    output = None if is_tied else found
                else:
                    vectors[_OUTSIDE] += parameter.numel()
            else:
                vectors[number] += parameter.numel()
    cached, states = _cached_values(model, shape), _states(model)
    each = [
        layer_of(
            shape,
            matrices=layers[number],
            vectors=vectors[number],
            cached_values=cached and cached[number],
            states=states[number],
        )
        for number in numbers
    ]
    return joined(each, final_vectors=vectors[_OUTSIDE], embeddings=tuple(embeddings), head=output)


def _states(model: PreTrainedModel) -> dict[int, tuple[KeptStates, ...]]:
    """The states of recurrent layers by number; none of a family whose layers run as they are."""
    found = defaultdict[int, tuple[KeptStates, ...]](tuple)
    for mixer in mixers_of(model) if record_of(model.config.model_type).recurrent else ():
        number, channels, width, shape, _ = state_of(mixer)
        kept = KeptStates(
            num_layers=1,
            num_channels=channels,
            width=width,
            num_values=math.prod(shape) if shape else 0,
            num_units=shared_heads(mixer),
        )
        found[number] += (kept,)
    return found


def _heads_of_modules(model: PreTrainedModel) -> dict[str, int]:
    """The key heads of recurrent layers that `tensor_parallel.shard` cuts, by the names of their modules."""
    is_cut = RECURRENT in record_of(model.config.model_type).tp_plan.values()
    mixers = [(name, module) for name, module in model.named_modules() if is_cut and shared_heads(module)]
    return {
        f"{name}.{part}": shared_heads(mixer)
        for name, mixer in mixers
        for part, _ in mixer.named_modules()
        if part and not part.endswith("_a_proj")
    }


def _cut_of(model: PreTrainedModel, name: str, module: nn.Module) -> int | None:
    """The dimension that ranks share, as `tensor_parallel.shard` has it; None for a module that is whole."""
    is_own = isinstance(module, nn.Embedding) and type(module) is not nn.Embedding
    if is_own and not record_of(model.config.model_type).cuts_own_embedding:
        return None
    with suppress(PlacementError):
        return cut_dim(model, name, whole=WholeParts.none)
    return None


class _Counting(Cache):
    """A cache that keeps nothing but the number of values that each layer gives it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.num_values = Counter[int]()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Count keys and values of one token."""
        self.num_values[layer_idx] += key_states.numel() + value_states.numel()
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The cache is empty."""
        return 0


def _cached_values(model: LibraryPart, shape: ModelShape) -> Mapping[int, int] | None:
    """The values of a token that each layer caches; None if a forward without weights does not tell.

    Of a recurrent family, whose forward does not, the layers with slots cache values.
    """
    if record_of(shape.model_type).recurrent:
        of_layer = shape.latent_width or 2 * shape.num_key_value_heads * shape.head_dim
        return Counter(dict.fromkeys(with_slots(model.config), of_layer))
    for _, experts in experts_of(model):
        experts.forward = lambda x, *_args, **_options: x
    cache, ids = _Counting(), torch.zeros(1, 1, dtype=torch.long, device="meta")
    with suppress(Exception), torch.no_grad():  # of any family's code
        model.to("meta")(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)
        return cache.num_values
    return None

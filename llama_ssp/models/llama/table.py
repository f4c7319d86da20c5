"""The parameters of a Llama-like model or a draft head, as its files store them; see `models.weights`.

    model.embed_tokens                 (V, E)    vocabulary
    model.layers.N.input_layernorm     (E,)
        self_attn.q_proj, k_proj, v_proj, or qkv_proj         outputs: heads
        self_attn.q_norm, k_norm       (D,)      of some families
        self_attn.o_proj                                      inputs: heads
        mlp.gate_proj, up_proj, or gate_up_proj               outputs: MLP units
        mlp.down_proj                                         inputs: MLP units
        post_attention_layernorm       (E,)
    model.norm                         (E,)
    lm_head                            (V, E)    vocabulary

What a draft head has besides, its source says (`weights.source.TapSource`).

Shapes: V vocabulary, E hidden size, D head dim.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llama_ssp.architectures.family import check_servable, inventory, record_of
from llama_ssp.architectures.matrices import HEAD_CUTS, Inventory, Matrix, WholeParts, cut_of
from llama_ssp.catalogue import ModelShape
from llama_ssp.models.weights import LINEAR, OTHER, Loading, Matched, Parameter, StoredSlice, Weights, config_errors
from llama_ssp.types import LibraryPart
from llama_ssp.weights.source import TapSource, WeightSource, tap_source

EMBEDDING, OUTPUT, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]+)")


def llama_table(
    config: LibraryPart,
    shape: ModelShape,
    *,
    whole: WholeParts = WholeParts.none,
    head: TapSource | None = None,
) -> dict[str, Parameter]:
    """The parameters of an unsplit model of a Llama kind (`loading.is_llama_kind`), in the order of the decoder.

    Args:
        config: the config of the model, or of the model whose layers a head has.
        shape: the shape of the model or the head.
        whole: parts that every rank holds whole.
        head: the source of a draft head; None for a model.
    """
    family, held = record_of(config.model_type), inventory(shape).keeping(whole)
    biased = {matrix.module for matrix in held.layer if matrix.has_bias}
    if family.biased_by:
        biased = {name for field, names in family.biased_by.items() if getattr(config, field, False) for name in names}
    (embedding,), norm = held.embeddings, Parameter((shape.hidden_size,))
    head_norms = dict.fromkeys(_HEAD_NORMS if family.norms_heads else (), Parameter((shape.head_dim,)))
    of_first, places = (head.first_norms, head.places) if head else ((), {})
    table = {OUTPUT: _weight(held.head or embedding, OTHER), EMBEDDING: _weight(embedding, OTHER)}
    for number in range(shape.num_hidden_layers):
        place = f"model.layers.{number}"
        for matrix in _of_layer(held, number, places):
            table |= _linear(place, matrix, places.get(matrix.module), has_bias=matrix.module in biased)
        norms = dict.fromkeys((*_NORMS, *(of_first if number == 0 else ())), norm)
        table |= {f"{place}.{name}.weight": parameter for name, parameter in (head_norms | norms).items()}
    more = {name: Parameter(size) for name, size in head.more_parameters().items()} if head else {}
    return {**table, **more, LAST_NORM: norm}


def _of_layer(held: Inventory, number: int, places: Collection[str]) -> list[Matrix]:
    """Return the matrices of a layer.

    Only the first layer has the matrices in `places`. If two have one name, the first of them is the first layer's.
    """
    found: dict[str, Matrix] = {}
    for matrix in held.layer:
        if matrix.module not in found or number:
            found[matrix.module] = matrix
    return [matrix for matrix in found.values() if matrix.module not in places or number == 0]


_NORMS, _HEAD_NORMS = ("input_layernorm", "post_attention_layernorm"), ("self_attn.q_norm", "self_attn.k_norm")


def _weight(matrix: Matrix, role: str = LINEAR) -> Parameter:
    units = None if matrix.cut is None else cut_of(matrix.module)
    return Parameter((matrix.num_rows, matrix.num_columns), role, matrix.cut, units)


def _linear(layer: str, matrix: Matrix, place: str | None, *, has_bias: bool) -> Iterator[tuple[str, Parameter]]:
    """Weight and bias of a linear layer, at its place in attention or MLP unless another one is given."""
    weight = _weight(matrix)
    name = place or f"{layer}.{'self_attn' if cut_of(matrix.module) in HEAD_CUTS else 'mlp'}.{matrix.module}"
    yield f"{name}.weight", weight
    if has_bias:
        yield f"{name}.bias", Parameter((matrix.num_rows,), dim=0 if matrix.cut == 0 else None, units=weight.units)


def match_lean(origin: WeightSource, whole: WholeParts) -> Matched:
    """Match the parameters of a model or head, as the lean decoder has them, with the tensors of its files."""
    check_servable(lambda name: getattr(origin.config, name, None))
    with config_errors(origin.folder):
        rotary_of(origin.config)
    head = tap_source(origin)
    table = llama_table(origin.config, origin.shape, whole=whole, head=head)
    named = {name if name in table else f"model.{name}": name for name in origin.tensors}
    ties = {OUTPUT: EMBEDDING} if origin.config.tie_word_embeddings and (head is None or head.ties) else {}
    return Matched(origin, table, named=named, ties=ties)


def lean_weights(loading: Loading, *, has_embedding: bool, places: Mapping[str, nn.Parameter]) -> Weights:
    """The weights of this rank, whose layers are counted from 0; raises as `loading.load_model`.

    For `places` see `Weights`.
    """
    matched = match_lean(loading.origin, loading.kept_whole)
    matched.check_packed(loading.precision.quantization)
    shard, rows, stage, layers = loading.own_shard, {}, loading.stage, loading.own_layers
    kept = {EMBEDDING: has_embedding and stage.is_first, OUTPUT: stage.is_last, LAST_NORM: stage.is_last}
    for name, parameter in matched.table.items():
        cut, sizes = parameter.slice_of(shard), [*parameter.shape]
        if cut:
            sizes[cut.dim] = sum(map(len, cut.parts))
        of_layer = _LAYER.match(name)
        if kept.get(name, of_layer is None or int(of_layer[1]) in layers):
            own = f"model.layers.{layers.index(int(of_layer[1]))}{name[of_layer.end() :]}" if of_layer else name
            size, dtype = math.prod(sizes), loading.weights_dtype
            rows[own] = StoredSlice(matched.sources[name], cut, size, dtype, loading.device)
    return Weights(loading, rows, places=places)


def rotary_of(config: LibraryPart) -> tuple[Tensor, float]:
    """The inverse frequencies (D / 2,) of the rotary embedding, and the factor of its sines and cosines.

    Frequencies hold for the first positions; see `family.num_positions`.
    """
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return found
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

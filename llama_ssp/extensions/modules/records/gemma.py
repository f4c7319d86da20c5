"""Gemma 1, 2, and the text models of 3 and 4: the embedding scales its output; later ones have sliding windows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.architectures.family import Family, windows_of_layers
from llama_ssp.architectures.matrices import ATTENTION, GATED, Inventory, Matrix, decoder, joined
from llama_ssp.catalogue import ModelShape
from llama_ssp.extensions.modules.records import unwritten

GEMMA = Family(model_type="gemma", parameters=decoder, cuts_vocabulary=True, cuts_own_embedding=True)
GEMMA3 = replace(
    GEMMA,
    model_type="gemma3_text",
    parameters=partial(decoder, norms=4, head_norms=2),
    windows=windows_of_layers,
    num_masks=2,
)
GEMMA2 = replace(  # its scores are softcapped
    GEMMA3,
    model_type="gemma2",
    parameters=partial(decoder, norms=4),
    attention="eager",
    keeps_scores=True,
    adapt="llama_ssp.extensions.modules.attention:use_softcapped",
)


def _sizes_of_4(field: Callable[[str], Any]) -> dict[str, Any]:
    """Sizes in which the layers of a Gemma 4 differ, from a config of the hub or of the library, which lists layers."""
    num_layers = field("num_hidden_layers")
    kinds = field("layer_types") or ["full_attention" if number % 6 == 5 else "" for number in range(num_layers)]
    is_global = [kind == "full_attention" for kind in kinds[:-1]] + [True]
    num_own = num_layers - (field("num_kv_shared_layers") or 0)
    letters = ["sSgG"[2 * is_whole + (number >= num_own)] for number, is_whole in enumerate(is_global)]
    ours = {int(number): found for number, found in (field("per_layer_config") or {}).items()}.get(num_layers - 1, {})
    is_both = bool(field("attention_k_eq_v"))
    num_heads = ours.get("num_key_value_heads") or (is_both and field("num_global_key_value_heads"))
    width = field("hidden_size_per_layer_input")
    return {
        "layer_kinds": "".join(letters),
        "global_head_dim": (ours or {"head_dim": field("global_head_dim") or 512}).get("head_dim", field("head_dim")),
        "num_global_key_value_heads": num_heads or field("num_key_value_heads"),
        "attention_k_eq_v": is_both,
        "use_double_wide_mlp": bool(field("use_double_wide_mlp")),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": field("vocab_size_per_layer_input") if width else 0,
    }


def _parameters_of_4(shape: ModelShape) -> Inventory:
    """Layers of each kind, whose output one number scales, and a router's two scales."""
    whole, layers = decoder(replace(shape, num_experts=0)), {}
    size, width = shape.hidden_size, shape.hidden_size_per_layer_input
    of_layer = 1 + (shape.num_experts and size + shape.num_experts) + (size if width else 0)
    # The library has the second matrices of all layers in one.
    names = ("layers.*.per_layer_input_gate", "per_layer_model_projection", "layers.*.per_layer_projection")
    own = [
        Matrix(module=name.rpartition(".")[2], num_columns=columns, num_rows=rows, name=f"model.{name}")
        for name, columns, rows in zip(names, (size, size, width), (width, width, size), strict=True)
        if width
    ]
    for kind in {*shape.layer_kinds}:
        of_kind, kept = shape, [*ATTENTION, *GATED]
        if kind in "gG":
            heads = shape.num_global_key_value_heads
            of_kind = replace(shape, head_dim=shape.global_head_dim, num_key_value_heads=heads)
            kept = [name for name in kept if name != "v_proj" or not shape.attention_k_eq_v]
        if kind.isupper():
            of_kind = replace(of_kind, intermediate_size=shape.intermediate_size * (1 + shape.use_double_wide_mlp))
            kept = [name for name in kept if name not in {"k_proj", "v_proj"}]
        part = decoder(
            of_kind,
            kept,
            norms=7 if shape.num_experts else 4,
            head_norms=1 + kind.islower(),
            names=[("mlp.shared_experts", "mlp"), ("mlp.experts", "experts")],
        ).by_layer(-1)
        layers[kind] = replace(part, layer=(*part.layer, *own), layer_vectors=part.layer_vectors + of_layer)
    embeddings = whole.embeddings
    if width:
        rows, columns = shape.vocab_size_per_layer_input, shape.num_hidden_layers * width
        embeddings += (Matrix(module="embed_tokens_per_layer", num_rows=rows, num_columns=columns),)
    each = [layers[kind] for kind in shape.layer_kinds]
    return joined(each, final_vectors=whole.final_vectors + (width or 0), embeddings=embeddings, head=whole.head)


GEMMA3N = unwritten("gemma3n_text", cuts_own_embedding=True, has_stages=False)
VAULTGEMMA = unwritten("vaultgemma", cuts_own_embedding=True)
GEMMA4_UNIFIED = unwritten("gemma4_unified_text", cuts_own_embedding=True, has_stages=False)
GEMMA4 = replace(  # some layers read the keys of earlier ones, and all of them an embedding of their own
    GEMMA3, model_type="gemma4_text", parameters=_parameters_of_4, sizes=_sizes_of_4, has_stages=False
)

"""Gemma 1, 2, and the text models of 3 and 4: the embedding scales its output; later ones have sliding windows."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.architectures.family import Family, windows_of_layers
from llama_ssp.architectures.matrices import ATTENTION, GATED, Inventory, Matrix, decoder
from llama_ssp.catalogue import ModelShape
from llama_ssp.rooms.modules.records import unwritten

GEMMA = Family(model_type="gemma", parameters=decoder, cuts_vocabulary=True, cuts_own_embedding=True)
GEMMA3 = replace(
    GEMMA, model_type="gemma3_text", parameters=partial(decoder, norms=4, head_norms=2), windows=windows_of_layers,
    num_masks=2,
)  # fmt: skip
GEMMA2 = replace(  # its scores are softcapped
    GEMMA3, model_type="gemma2", parameters=partial(decoder, norms=4), attention="eager", keeps_scores=True,
    adapt="llama_ssp.rooms.modules.attention:use_softcapped",
)  # fmt: skip


def _sizes_of_4(field: Callable[[str], Any]) -> dict[str, Any]:
    """Sizes in which the layers of a Gemma 4 differ, from a config of the hub or of the library, which lists layers."""
    num_layers = field("num_hidden_layers")
    kinds = field("layer_types") or ["full_attention" if number % 6 == 5 else "" for number in range(num_layers)]  # noqa: PLR2004
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
    """Matrices of each kind of layers, with the shares of layers that have them; vectors in the mean."""
    whole = decoder(replace(shape, num_experts=0))
    width, num_layers = shape.hidden_size_per_layer_input, shape.num_hidden_layers
    layer, num_vectors = [], num_layers  # one number scales the output of a layer
    for kind, count in sorted(Counter(shape.layer_kinds).items()):
        of_kind, kept = shape, [*ATTENTION, *GATED]
        if kind in "gG":
            heads = shape.num_global_key_value_heads
            of_kind = replace(shape, head_dim=shape.global_head_dim, num_key_value_heads=heads)
            kept = [name for name in kept if name != "v_proj" or not shape.attention_k_eq_v]
        if kind.isupper():
            of_kind = replace(of_kind, intermediate_size=shape.intermediate_size * (1 + shape.use_double_wide_mlp))
            kept = [name for name in kept if name not in {"k_proj", "v_proj"}]
        part = decoder(of_kind, kept, norms=7 if shape.num_experts else 4, head_norms=1 + kind.islower())
        share = count / num_layers
        layer += [
            replace(matrix, copies=share * matrix.copies, num_chosen=share * matrix.num_chosen) for matrix in part.layer
        ]
        num_vectors += count * part.layer_vectors
    num_vectors += num_layers * (shape.num_experts and shape.hidden_size + shape.num_experts)  # scales of the router
    embeddings, num_final = whole.embeddings, whole.final_vectors
    if width:
        of_layer: dict[str, Any] = {"num_columns": shape.hidden_size, "num_rows": width}
        layer += [Matrix(module=name, **of_layer) for name in ("per_layer_input_gate", "per_layer_model_projection")]
        layer.append(Matrix(module="per_layer_projection", num_columns=width, num_rows=shape.hidden_size))
        rows, columns = shape.vocab_size_per_layer_input, num_layers * width
        embeddings += (Matrix(module="embed_tokens_per_layer", num_rows=rows, num_columns=columns),)
        num_vectors, num_final = num_vectors + num_layers * shape.hidden_size, num_final + width
    per_layer, rest = divmod(num_vectors, num_layers)
    return replace(
        whole, layer=tuple(layer), layer_vectors=per_layer, final_vectors=num_final + rest, embeddings=embeddings
    )


GEMMA3N = unwritten("gemma3n_text", cuts_own_embedding=True, has_stages=False)
VAULTGEMMA = unwritten("vaultgemma", cuts_own_embedding=True)
GEMMA4_UNIFIED = unwritten("gemma4_unified_text", cuts_own_embedding=True, has_stages=False)
GEMMA4 = replace(  # some layers read the keys of earlier ones, and all of them an embedding of their own
    GEMMA3, model_type="gemma4_text", parameters=_parameters_of_4, sizes=_sizes_of_4, has_stages=False
)

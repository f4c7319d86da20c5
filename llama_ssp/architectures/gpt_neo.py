"""GPT-Neo: learned positions (not sharded), layer norms, plain MLP, sliding windows in every other layer.

The library has no tensor-parallel plan for it, so the record has one.
"""

from dataclasses import replace
from typing import Any

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import Inventory, Matrix, decoder
from llama_ssp.catalogue import ModelShape

_TP_PLAN = {
    "transformer.wte": "embedding_rowwise",
    **{f"transformer.h.*.attn.attention.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    "transformer.h.*.attn.attention.out_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def _parameters(shape: ModelShape) -> Inventory:
    found = decoder(
        shape, ("q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"), biased=("out_proj", "c_fc", "c_proj"),
        norms=4, final_norms=2,
    )  # fmt: skip
    places = Matrix(module="wpe", num_rows=shape.max_position_embeddings, num_columns=shape.hidden_size)
    return replace(found, embeddings=(replace(found.embeddings[0], module="wte"), places))


def _windows(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
    return tuple(config.window_size if kind == "local" else None for kind in config.attention_layers)


FAMILY = Family(
    model_type="gpt_neo",
    parameters=_parameters,
    windows=_windows,
    num_masks=4,
    attention="eager",
    tp_plan=_TP_PLAN,
    check_files="llama_ssp.models.huggingface.gpt_neo:check_positions",
    adapt="llama_ssp.models.huggingface.gpt_neo:adapt",
)

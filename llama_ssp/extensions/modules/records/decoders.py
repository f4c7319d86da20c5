"""Decoders like Llama, up to GPT-Neo, with other norms, fused matrices, plain MLPs or multipliers."""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.decoders import MISTRAL, QKV, QWEN3
from llama_ssp.architectures.family import VOCABULARY_PLAN, Family, layer_plan
from llama_ssp.architectures.matrices import ATTENTION, PLAIN, Cut, Inventory, Matrix, decoder
from llama_ssp.catalogue import ModelShape
from llama_ssp.extensions.modules.records import unwritten
from llama_ssp.types import LibraryPart

_GLM = (*ATTENTION, "gate_up_proj", "down_proj")
_TP_PLAN = (
    VOCABULARY_PLAN
    | layer_plan("self_attn", QKV, ["o_proj"])
    | layer_plan("mlp", ["gate_proj", "up_proj"], ["down_proj"])
)

GRANITE = Family(model_type="granite", parameters=decoder, cuts_vocabulary=True)
MINISTRAL3 = replace(GRANITE, model_type="ministral3", windows=MISTRAL.windows)
ERNIE = replace(GRANITE, model_type="ernie4_5")
HELIUM = replace(GRANITE, model_type="helium")
SMOLLM3 = replace(MINISTRAL3, model_type="smollm3")
EXAONE4 = replace(MINISTRAL3, model_type="exaone4", parameters=QWEN3.parameters)
HUNYUAN = replace(EXAONE4, model_type="hunyuan_v1_dense", windows=None, tp_plan=_TP_PLAN)
STABLELM = replace(
    GRANITE, model_type="stablelm", parameters=partial(decoder, norms=4, final_norms=2), tp_plan=_TP_PLAN
)

OLMO = replace(GRANITE, model_type="olmo", parameters=partial(decoder, norms=0, final_norms=0))
OLMO2 = replace(  # norms go over all queries and all keys of a token
    GRANITE,
    model_type="olmo2",
    keeps_attention=True,
    parameters=lambda shape: decoder(shape, head_norms=shape.num_attention_heads + shape.num_key_value_heads),
)
OLMO3 = replace(OLMO2, model_type="olmo3", windows=MISTRAL.windows)

COHERE = replace(GRANITE, model_type="cohere", parameters=partial(decoder, norms=1))
COHERE2 = replace(COHERE, model_type="cohere2", windows=MISTRAL.windows)
GLM = replace(GRANITE, model_type="glm", parameters=partial(decoder, modules=_GLM, biased=QKV))
GLM4 = replace(GLM, model_type="glm4", parameters=partial(decoder, modules=_GLM, biased=QKV, norms=4))
STARCODER2 = replace(
    MINISTRAL3,
    model_type="starcoder2",
    parameters=partial(
        decoder, modules=(*ATTENTION, "c_fc", "c_proj"), biased=(*ATTENTION, "c_fc", "c_proj"), norms=4, final_norms=2
    ),
)
ARCEE = replace(GRANITE, model_type="arcee", parameters=partial(decoder, modules=(*ATTENTION, *PLAIN)))


def _with_learned_bends(shape: ModelShape, modules: tuple[str, ...], *, head_norms: int) -> Inventory:
    """The inventory with two learned numbers and two constants of the activation in each layer."""
    found = decoder(shape, modules, head_norms=head_norms)
    return replace(found, layer_vectors=found.layer_vectors + 4)


APERTUS = replace(
    ARCEE, model_type="apertus", parameters=partial(_with_learned_bends, modules=(*ATTENTION, *PLAIN), head_norms=2)
)
NEMOTRON = replace(
    ARCEE, model_type="nemotron", parameters=partial(decoder, modules=(*ATTENTION, *PLAIN), norms=4, final_norms=2)
)

_PHI = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")
PHI = Family(
    model_type="phi",
    parameters=partial(decoder, modules=_PHI, biased=(*_PHI, "lm_head"), final_norms=2),
    cuts_vocabulary=True,
)
"""Phi 1, 1.5 and 2: attention and MLP share one layer norm, biases everywhere."""
_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")


def _of_neox(shape: ModelShape) -> Inventory:
    """Biases everywhere, and layer norms; every rank holds the whole embedding."""
    names = ("model", "gpt_neox"), ("self_attn", "attention")
    found = decoder(shape, _NEOX, biased=_NEOX, norms=4, final_norms=2, names=names)
    return replace(found, embeddings=(replace(found.embeddings[0], module="embed_in", cut=None),))


GPT_NEOX = Family(model_type="gpt_neox", parameters=_of_neox)

_NEO_PLAN = {
    "transformer.wte": "embedding_rowwise",
    **{f"transformer.h.*.attn.attention.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    "transformer.h.*.attn.attention.out_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def _of_neo(shape: ModelShape) -> Inventory:
    """Learned positions, which are not sharded, layer norms and plain MLPs."""
    found = decoder(
        shape,
        ("q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"),
        biased=("out_proj", "c_fc", "c_proj"),
        norms=4,
        final_norms=2,
        names=[("model.layers", "transformer.h"), ("self_attn", "attn.attention")],
    )
    places = Matrix(module="wpe", num_rows=shape.max_position_embeddings, num_columns=shape.hidden_size)
    return replace(found, embeddings=(replace(found.embeddings[0], module="wte"), places))


def _windows_of_neo(config: LibraryPart) -> tuple[int | None, ...]:
    """Every other layer has a window."""
    return tuple(config.window_size if kind == "local" else None for kind in config.attention_layers)


GPT_NEO = Family(
    model_type="gpt_neo",
    parameters=_of_neo,
    windows=_windows_of_neo,
    num_masks=4,
    attention="eager",
    num_layer_outputs=2,
    tp_plan=_NEO_PLAN,  # the library has none
    check_files="llama_ssp.extensions.modules.families:check_gpt_neo",
    adapt="llama_ssp.extensions.modules.families:adapt_gpt_neo",
)
GPT_NEOX_JAPANESE = unwritten(
    "gpt_neox_japanese", adapt="llama_ssp.extensions.modules.families:adapt_gpt_neox_japanese"
)

HUNYUAN_VL = unwritten("hunyuan_vl_text", tp_plan=_TP_PLAN)
PERSIMMON = unwritten(
    "persimmon",
    tp_plan={
        **layer_plan("self_attn", ["query_key_value"], ["dense"]),
        **layer_plan("mlp", ["dense_h_to_4h"], ["dense_4h_to_h"]),
    },
)
OPT, XGLM, BIOGPT = (
    unwritten(
        kind,
        tp_plan={
            **layer_plan("self_attn", QKV, ["out_proj"], layers=layers),
            **layer_plan("", ["fc1"], ["fc2"], layers=layers),
        },
    )
    for kind, layers in (("opt", "model.decoder.layers"), ("xglm", "model.layers"), ("biogpt", "biogpt.layers"))
)
GPTJ = unwritten(
    "gptj",
    tp_plan={
        **layer_plan("attn", QKV, ["out_proj"], layers="transformer.h"),
        **layer_plan("mlp", ["fc_in"], ["fc_out"], layers="transformer.h"),
    },
)
"""Kinds without a plan in the library; every rank holds their output."""
_GPT_PLAN = {
    "transformer.wte": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
    **layer_plan("attn", ["c_attn"], ["c_proj"], layers="transformer.h"),
    **layer_plan("mlp", ["c_fc"], ["c_proj"], layers="transformer.h"),
}
_LINEARS = "llama_ssp.extensions.modules.families:use_linears"
GPT2 = unwritten(
    "gpt2", tp_plan=_GPT_PLAN, adapt=_LINEARS, turned=("c_attn.weight", "q_attn.weight", "c_proj.weight", "c_fc.weight")
)
GPT_BIGCODE = unwritten("gpt_bigcode", tp_plan=_GPT_PLAN, cuts={"c_attn": Cut.fused_qkv})
FALCON = unwritten(
    "falcon",
    adapt=_LINEARS,
    tp_plan={
        "transformer.word_embeddings": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        **layer_plan("self_attention", ["query_key_value"], ["dense"], layers="transformer.h"),
        **layer_plan("mlp", ["dense_h_to_4h"], ["dense_4h_to_h"], layers="transformer.h"),
    },
)

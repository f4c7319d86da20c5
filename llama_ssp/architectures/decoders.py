"""Decoders like Llama: other norms, fused matrices, plain MLPs, multipliers; most run as the library's modules."""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.family import VOCABULARY_PLAN, Family, layer_plan
from llama_ssp.architectures.llama import MISTRAL, QKV, QWEN2, QWEN3
from llama_ssp.architectures.matrices import ATTENTION, GATED, PLAIN, Inventory, decoder
from llama_ssp.catalogue import ModelShape

_GLM = (*ATTENTION, "gate_up_proj", "down_proj")
_TP_PLAN = (
    VOCABULARY_PLAN
    | layer_plan("self_attn", QKV, ["o_proj"])
    | layer_plan("mlp", ["gate_proj", "up_proj"], ["down_proj"])
)


def _with_learned_bends(shape: ModelShape, modules: tuple[str, ...], *, head_norms: int) -> Inventory:
    """Two learned numbers and two others of the activation in each layer."""
    found = decoder(shape, modules, head_norms=head_norms)
    return replace(found, layer_vectors=found.layer_vectors + 4)


SEED_OSS = replace(
    QWEN2, model_type="seed_oss", windows=None,
    biased_by={"attention_bias": QKV, "attention_out_bias": ("o_proj",), "mlp_bias": GATED},
)  # fmt: skip
MINISTRAL = replace(MISTRAL, model_type="ministral")
CWM = replace(MISTRAL, model_type="cwm", biased_by={"mlp_bias": GATED})
PHI3 = replace(
    MISTRAL, model_type="phi3",
    parameters=partial(decoder, modules=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
)  # fmt: skip

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
    GRANITE, model_type="olmo2", keeps_attention=True,
    parameters=lambda shape: decoder(shape, head_norms=shape.num_attention_heads + shape.num_key_value_heads),
)  # fmt: skip
OLMO3 = replace(OLMO2, model_type="olmo3", windows=MISTRAL.windows)

COHERE = replace(GRANITE, model_type="cohere", parameters=partial(decoder, norms=1))
COHERE2 = replace(COHERE, model_type="cohere2", windows=MISTRAL.windows)
GLM = replace(GRANITE, model_type="glm", parameters=partial(decoder, modules=_GLM, biased=QKV))
GLM4 = replace(GLM, model_type="glm4", parameters=partial(decoder, modules=_GLM, biased=QKV, norms=4))
STARCODER2 = replace(
    MINISTRAL3, model_type="starcoder2",
    parameters=partial(
        decoder, modules=(*ATTENTION, "c_fc", "c_proj"), biased=(*ATTENTION, "c_fc", "c_proj"), norms=4, final_norms=2
    ),
)  # fmt: skip
ARCEE = replace(GRANITE, model_type="arcee", parameters=partial(decoder, modules=(*ATTENTION, *PLAIN)))
APERTUS = replace(
    ARCEE, model_type="apertus", parameters=partial(_with_learned_bends, modules=(*ATTENTION, *PLAIN), head_norms=2)
)  # fmt: skip
NEMOTRON = replace(
    ARCEE, model_type="nemotron", parameters=partial(decoder, modules=(*ATTENTION, *PLAIN), norms=4, final_norms=2)
)  # fmt: skip

_PHI = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")
PHI = Family(
    model_type="phi", parameters=partial(decoder, modules=_PHI, biased=(*_PHI, "lm_head"), final_norms=2),
    cuts_vocabulary=True,
)  # fmt: skip
"""Phi 1, 1.5 and 2: attention and MLP share one layer norm, biases everywhere."""
_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")


def _of_neox(shape: ModelShape) -> Inventory:
    """Biases everywhere, and layer norms; every rank holds the whole embedding."""
    found = decoder(shape, _NEOX, biased=_NEOX, norms=4, final_norms=2)
    return replace(found, embeddings=(replace(found.embeddings[0], module="embed_in", cut=None),))


GPT_NEOX = Family(model_type="gpt_neox", parameters=_of_neox)

"""Hybrids: layers of attention among layers that keep a recurrent state; a plan counts the library's modules."""

from functools import partial

from llama_ssp.architectures.family import unwritten

_MIXERS = "llama_ssp.models.huggingface.recurrent:adapt"
_LINEAR = ("linear_attention",)


def _plan(*, attention: str = "self_attn", mlp: str = "feed_forward") -> dict[str, str]:
    """The tensor-parallel plan of attention and MLPs; every rank has Mamba 2 and convolutions whole.

    The norm behind Mamba 2 goes over all heads of a group, and most models have one group.
    """
    columns = {attention: ("q_proj", "k_proj", "v_proj"), mlp: ("gate_proj", "up_proj", "w1", "w3", "input_linear")}
    rows = {attention: ("o_proj", "out_proj"), mlp: ("down_proj", "w2", "output_linear")}
    return {
        f"model.layers.*.{part}.{name}": style
        for style, of_parts in (("colwise", columns), ("rowwise", rows))
        for part, modules in of_parts.items()
        for name in modules
    } | {"lm_head": "colwise_gather_output"}


_DELTA = {"model.layers.*.linear_attn": "recurrent"}  # cut as one, with its convolution
_delta = partial(unwritten, adapt=_MIXERS, recurrent=_LINEAR)
_qwen = partial(_delta, tp_plan=_DELTA, gates_queries=True)
QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE = _qwen("qwen3_next"), _qwen("qwen3_5_text"), _qwen("qwen3_5_moe_text")
KIMI_LINEAR = _delta("kimi_linear", tp_plan={"model.layers.*.self_attn": "recurrent"} | {
    f"model.layers.*.self_attn.{name}": style
    for name, style in (("q_proj", "colwise"), ("q_b_proj", "colwise"), ("kv_b_proj", "colwise"), ("o_proj", "rowwise"))
})  # fmt: skip
OLMO_HYBRID = _delta("olmo_hybrid", tp_plan=_DELTA, keeps_attention=True)

_convolved = partial(unwritten, adapt=_MIXERS, recurrent=("conv",), tp_plan=_plan())
LFM2, LFM2_MOE = _convolved("lfm2"), _convolved("lfm2_moe")

_mamba = partial(unwritten, adapt=_MIXERS, recurrent=_LINEAR)
BAMBA = _mamba("bamba", tp_plan=_plan())
GRANITE_HYBRID = _mamba("granitemoehybrid", tp_plan=_plan(mlp="shared_mlp"))
FALCON_H1 = unwritten("falcon_h1", adapt=_MIXERS, recurrent=("hybrid",), tp_plan=_plan())
NEMOTRON_H = unwritten(
    "nemotron_h", adapt=_MIXERS, recurrent=(*_LINEAR, "mlp", "moe"),
    tp_plan=_plan(attention="mixer", mlp="mixer") | {"model.layers.*.mixer.out_proj": "replicated"},
)  # fmt: skip

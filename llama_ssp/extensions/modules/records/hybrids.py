"""Hybrids: layers of attention among layers that keep a recurrent state."""

from functools import partial

from llama_ssp.architectures.decoders import QKV
from llama_ssp.architectures.family import layer_plan
from llama_ssp.extensions.modules import layers
from llama_ssp.extensions.modules.records import unwritten
from llama_ssp.extensions.modules.records.experts import LATENT_PLAN

_MIXERS = "llama_ssp.extensions.modules.recurrent:adapt"
_LINEAR = ("linear_attention",)


def _plan(mlp: str = "feed_forward") -> dict[str, str]:
    """The tensor-parallel plan of attention and MLPs; every rank has Mamba 2 and convolutions whole.

    The norm after Mamba 2 goes over all heads of a group, and most models have one group.
    """
    of_attention = layer_plan("self_attn", QKV, ["o_proj", "out_proj"])
    of_mlp = layer_plan(mlp, ["gate_proj", "up_proj", "w1", "w3", "input_linear"], ["down_proj", "w2", "output_linear"])
    return of_attention | of_mlp | {"lm_head": "colwise_gather_output"}


_DELTA = {"model.layers.*.linear_attn": "recurrent"}  # cut as one, with its convolution
_linear = partial(unwritten, adapt=_MIXERS, recurrent=_LINEAR)
_qwen = partial(_linear, tp_plan=_DELTA, gates_queries=True, modules=layers.delta)
QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE = _qwen("qwen3_next"), _qwen("qwen3_5_text"), _qwen("qwen3_5_moe_text")
KIMI_LINEAR = _linear(
    "kimi_linear", tp_plan={"model.layers.*.self_attn": "recurrent"} | LATENT_PLAN, modules=layers.kimi
)
OLMO_HYBRID = _linear("olmo_hybrid", tp_plan=_DELTA, keeps_attention=True, modules=layers.delta)

_convolved = partial(unwritten, adapt=_MIXERS, recurrent=("conv",), tp_plan=_plan(), modules=layers.convolved)
LFM2, LFM2_MOE = _convolved("lfm2"), _convolved("lfm2_moe")

BAMBA = _linear("bamba", tp_plan=_plan(), modules=layers.mamba, num_layer_outputs=2)
GRANITE_HYBRID = _linear("granitemoehybrid", tp_plan=_plan("shared_mlp"), modules=layers.mamba)
FALCON_H1 = unwritten(
    "falcon_h1", adapt=_MIXERS, recurrent=("hybrid",), tp_plan=_plan(), modules=layers.mamba, num_layer_outputs=1
)
NEMOTRON_H = unwritten(
    "nemotron_h",
    adapt=_MIXERS,
    recurrent=(*_LINEAR, "mlp", "moe"),
    gates_experts=False,
    tp_plan=_plan("mixer") | {"model.layers.*.mixer.out_proj": "replicated"},
    modules=layers.nemotron,
)

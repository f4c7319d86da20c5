"""Hybrids: layers of attention among layers that keep a recurrent state; a plan counts the library's modules."""

from functools import partial

from llama_ssp.architectures.family import unwritten

_hybrid = partial(unwritten, adapt="llama_ssp.models.huggingface.recurrent:adapt")
_LINEAR = ("linear_attention",)

QWEN3_NEXT = _hybrid("qwen3_next", recurrent=_LINEAR)
QWEN3_5 = _hybrid("qwen3_5_text", recurrent=_LINEAR)
QWEN3_5_MOE = _hybrid("qwen3_5_moe_text", recurrent=_LINEAR)
LFM2 = _hybrid("lfm2", recurrent=("conv",))
LFM2_MOE = _hybrid("lfm2_moe", recurrent=("conv",))
BAMBA = _hybrid("bamba", recurrent=_LINEAR)
GRANITE_HYBRID = _hybrid("granitemoehybrid", recurrent=_LINEAR)
FALCON_H1 = _hybrid("falcon_h1", recurrent=("hybrid",))
NEMOTRON_H = _hybrid("nemotron_h", recurrent=(*_LINEAR, "mlp", "moe"))

"""Integers of 4 bits: half a byte per weight, and a word of 4 bytes, scale and zero, per group of inputs."""

from collections.abc import Mapping
from typing import Any

from llama_ssp.errors import shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import INT4_GROUPS, Found, Product, of_few_rows

_NAME = "int4_weight_only"


def _layout(described: Mapping[str, Any]) -> Found | None:
    if (said := tools.compressed(described)) and said.form == "pack-quantized":
        return tools.in_groups(
            said.block, said.weights, said.problems, storage=_NAME, name="compressed-tensors int4",
            weight="weight_packed", scale="weight_scale", zero="weight_zero_point", order="weight_g_idx",
            others=("weight_shape", *tools.OF_ACTIVATIONS),
            is_scattered=said.weights.get("actorder") in tools.SCATTERED,
        )  # fmt: skip
    described, problems = tools.of_auto_round(described)
    match described.get("quant_method"):
        case tools.GPTQ if described.get("bits") != 8:  # noqa: PLR2004 - a byte
            return tools.gptq(described, problems, {"bits": 4}, storage=_NAME, name="gptq int4")
        case tools.AWQ:
            version = described.get("version") or "gemm"
            problems += tools.differences(described, {"bits": 4, "zero_point": True})
            problems += [] if str(version).lower() == "gemm" else [f"version {shown(version)}"]
            return tools.in_groups(
                tools.grouped(described.get("group_size")), described, problems, storage=_NAME, name="awq int4",
                weight="qweight", scale="scales", zero="qzeros", has_inputs_first=True, joins_outputs=True,
            )  # fmt: skip
        case _:
            return None


INT4_WEIGHT_ONLY = of_few_rows(
    _NAME,
    order=4,
    short_name="int4wo",
    layout=_layout,
    reader="llama_ssp.weights.block_files:Int4Tensor",
    kernel="llama_ssp.models.quantization.weight_only:int4_weight_only_linear",
    compiled=Product("nibbles", "nibbles", ("avx512f",), INT4_GROUPS[-1]),
    weight_bytes=0.5,
    groups=INT4_GROUPS,
    loading_copies=4,  # codes are bytes on the way
    change_weight=5,
)

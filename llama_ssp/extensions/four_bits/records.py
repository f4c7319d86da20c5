"""The records of weights of 4 bits: integers with a scale and a zero per group, and E2M1, a float, for checkpoints.

E2M1 is MXFP4, with a power of two per 32 weights, or NVFP4, with E4M3 per 16; both have a scale per output too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.errors import shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import (
    FP4_GROUP,
    INT4_GROUPS,
    OF_FEW_ROWS,
    WORD_BYTES,
    Block,
    Files,
    Found,
    PackedLayout,
    Packing,
    Product,
    StorageFormat,
)

_NAME = "int4_weight_only"


def _layout(described: Mapping[str, Any]) -> Found | None:
    if (said := tools.compressed(described)) and said.form == "pack-quantized":
        return tools.in_groups(
            said.block,
            said.weights,
            said.problems,
            storage=_NAME,
            name="compressed-tensors int4",
            weight="weight_packed",
            scale="weight_scale",
            zero="weight_zero_point",
            order="weight_g_idx",
            others=("weight_shape", *tools.OF_ACTIVATIONS),
            is_scattered=said.weights.get("actorder") in tools.SCATTERED,
        )
    described, problems = tools.of_auto_round(described)
    match described.get("quant_method"):
        case tools.GPTQ if described.get("bits") != 8:
            return tools.gptq(described, problems, {"bits": 4}, storage=_NAME, name="gptq int4")
        case tools.AWQ:
            version = described.get("version") or "gemm"
            problems += tools.differences(described, {"bits": 4, "zero_point": True})
            problems += [] if str(version).lower() == "gemm" else [f"version {shown(version)}"]
            return tools.in_groups(
                tools.grouped(described.get("group_size")),
                described,
                problems,
                storage=_NAME,
                name="awq int4",
                weight="qweight",
                scale="scales",
                zero="qzeros",
                has_inputs_first=True,
                joins_outputs=True,
            )
        case _:
            return None


INT4_WEIGHT_ONLY = StorageFormat(
    name=_NAME,
    order=4,
    short_name="int4wo",
    kernel="llama_ssp.extensions.four_bits.linear:int4_weight_only_linear",
    packing=Packing(weight_bytes=0.5, groups=INT4_GROUPS),
    cost=replace(OF_FEW_ROWS, loading_copies=4),  # codes are bytes on the way
    files=Files(
        layout=_layout,
        reader="llama_ssp.extensions.four_bits.files:Int4Tensor",
        counted_bits=4,
        reads="int4 in groups of 32 inputs or a multiple (compressed-tensors pack-quantized, gptq, awq gemm, "
        "auto-round)",
    ),
    compiled=Product("nibbles", "nibbles", ("avx512f",), INT4_GROUPS[-1]),
    fp32_on_cpus=True,
    one_gpu_per_rank=True,
    has_published_times=True,
    change_weight=5,
)
_SCALED = {"mxfp4": 32, "nvfp4": 16}
"""Number of inputs that share a scale, by format."""


def _fp4_layout(described: Mapping[str, Any]) -> Found | None:
    said = tools.compressed(described)
    if said and (storage := said.form.removesuffix("-pack-quantized")) in _SCALED:
        return _scaled(
            said.block,
            said.problems,
            storage=storage,
            name=f"compressed-tensors {storage}",
            weight="weight_packed",
            factor="weight_global_scale" if storage == "nvfp4" else "",
            divides=True,
        )
    if described.get("quant_method") == "mxfp4":
        return _scaled((1, 32), [], storage="mxfp4", name="mxfp4", weight="_blocks", scale="_scales", joint="")
    if described.get("quant_method") != tools.MODELOPT or described.get("quant_algo") == "FP8":
        return None
    weights = tools.weights_of(described) or [described]
    if (algorithm := described.get("quant_algo")) != "NVFP4" or len(weights) > 1:
        return [f"quant_algo {shown(algorithm)} with {len(weights)} config_groups"]
    return _scaled(
        tools.grouped(tools.field_of(weights[0], "group_size")),
        [],
        storage="nvfp4",
        name="modelopt nvfp4",
        weight="weight",
        factor="weight_scale_2",
    )


def _scaled(
    block: Block | None,
    problems: list[str],
    *,
    storage: str,
    **layout: Any,
) -> Found:
    if block != (1, _SCALED[storage]):
        problems = [*problems, f"group_size {shown(block and block[1])}"]
    layout = {"scale": "weight_scale", "others": tools.OF_ACTIVATIONS} | layout
    return problems or PackedLayout(storage=storage, block=block or (1, None), group=FP4_GROUP, **layout)


_FILES = Files(reader="llama_ssp.extensions.four_bits.files:Fp4Tensor", stored_kind="U8")
MXFP4 = StorageFormat(
    name="mxfp4",
    order=7,
    kernel="llama_ssp.extensions.four_bits.linear:mxfp4_linear",
    packing=Packing(weight_bytes=0.5, row_bytes=WORD_BYTES, word_bytes=1, groups=(FP4_GROUP,)),
    cost=OF_FEW_ROWS,
    files=replace(_FILES, reads="MXFP4 (mxfp4, compressed-tensors)", layout=_fp4_layout),
    compiled=Product("mxfp4", "e2m1", ("avx512f", "f16c"), FP4_GROUP, _SCALED["mxfp4"], "float8_e8m0fnu"),
    fp32_on_cpus=True,
    one_gpu_per_rank=True,
    is_stored_alone=True,
)


NVFP4 = replace(
    MXFP4,
    name="nvfp4",
    order=8,
    kernel="llama_ssp.extensions.four_bits.linear:nvfp4_linear",
    packing=replace(MXFP4.packing, word_bytes=2),
    files=replace(_FILES, reads="NVFP4 (compressed-tensors, modelopt)", stored_kind="F8_E4M3"),
    compiled=MXFP4.product._replace(kind="nvfp4", scaled=_SCALED["nvfp4"], scale_dtype="float8_e4m3fn"),
)

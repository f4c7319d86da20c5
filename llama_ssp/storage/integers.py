"""Integers of 8 bits: LLM.int8(), which quantizes inputs too, weights alone by outputs, and weights alone by groups.

Of 4 bits: half a byte per weight, and a word of 4 bytes, scale and zero, per group of inputs.

Source: Dettmers et al. 2022, arXiv:2208.07339.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.errors import shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import (
    BITSANDBYTES,
    INT4_GROUPS,
    WORD_BYTES,
    Block,
    Found,
    PackedLayout,
    Product,
    StorageFormat,
    of_few_rows,
)

BNB_FORM = "weight_format"
"""Last part of the name of a tensor with the order of int8 weights; 0 for row by row."""
_BY_OUTPUTS, _BY_GROUPS, _BY_NIBBLES = "int8_weight_only", "int8_groups", "int4_weight_only"
_PER_OUTPUT: tuple[Block, ...] = ((1, None), (None, None))
"""Blocks without a border within a row."""
_SLOWDOWN = 4.0  # Relative to fp16 on GPUs: 3-5x as published, nearly constant from 1 to K + 1 rows.


def _layout_of_bytes(described: Mapping[str, Any]) -> Found | None:
    if (said := tools.compressed(described)) and said.form in ("packed bytes", "int-quantized"):
        problems = said.problems + (["symmetric false"] if said.weights.get("symmetric") is False else [])
        if said.block not in _PER_OUTPUT:
            problems.append(f"strategy {shown(said.weights.get('strategy'))}")
        return problems or PackedLayout(
            name="compressed-tensors int8", storage=_BY_OUTPUTS, block=said.block or _PER_OUTPUT[0],
            scale="weight_scale", weight="weight_packed" if said.form == "packed bytes" else "weight",
            others=("weight_shape", *tools.OF_ACTIVATIONS),
        )  # fmt: skip
    if described.get("quant_method") == tools.BITSANDBYTES and described.get("load_in_8bit") is True:
        wanted = {"load_in_4bit": False}
        return [*tools.differences(wanted | {**described}, wanted)] or PackedLayout(
            name="bitsandbytes int8", storage=_BY_OUTPUTS, block=(1, None), weight="weight", scale="SCB",
            others=(BNB_FORM,), steps=127,
        )  # fmt: skip
    described, problems = tools.of_auto_round(described)
    if described.get("quant_method") != tools.GPTQ or described.get("bits") != 8:  # noqa: PLR2004 - a byte
        return None
    found = tools.gptq(described, {"sym": True, "desc_act": False}, storage=_BY_GROUPS, name="gptq int8")
    if isinstance(found, PackedLayout) and found.block[1] is None:
        found = replace(found, storage=_BY_OUTPUTS, group=0)
    return problems + found if isinstance(found, list) else problems or found


INT8 = StorageFormat(
    name="int8",
    order=1,
    kernel="llama_ssp.models.quantization.precision:int8_linear",
    compiled=Product("dots", "dots", ("avx512vnni",)),
    weight_bytes=1,
    row_bytes=WORD_BYTES,
    fp32_on_cpus=True,
    gpu_read_bytes=lambda rows, packed, unquantized: _SLOWDOWN * unquantized,  # noqa: ARG005
    rounds_inputs=True,
    package=BITSANDBYTES,
    change_weight=3,
    draft_advice=(
        "an int8 draft through bitsandbytes cannot gain: it decodes 3-5x slower than {dtype} "
        "(published); use draft.model.quantization=none or int8_weight_only"
    ),
    target_advice=(
        "an int8 target through bitsandbytes saves memory, not time: it decodes 3-5x slower than {dtype} (published)"
    ),
)
INT8_WEIGHT_ONLY = of_few_rows(
    _BY_OUTPUTS,
    order=3,
    short_name="int8wo",
    layout=_layout_of_bytes,
    reader="llama_ssp.weights.packed_files:ByteTensor",
    kernel="llama_ssp.models.quantization.weight_only:int8_weight_only_linear",
    compiled=Product("bytes", "bytes"),
    stored_kind="I8",
    weight_bytes=1,
    row_bytes=WORD_BYTES,
    change_weight=3,
)
INT8_GROUPS = replace(  # a scale per group; every product unpacks the matrix
    INT8_WEIGHT_ONLY,
    name=_BY_GROUPS,
    order=9,
    short_name=None,
    layout=None,
    kernel="llama_ssp.models.quantization.weight_only:int8_groups_linear",
    compiled=None,
    row_bytes=0,
    groups=INT4_GROUPS,
    fp32_on_cpus=False,
    is_stored_alone=True,
    gpu_read_bytes=lambda rows, packed, unquantized: packed + 2 * unquantized,  # noqa: ARG005
    change_weight=None,
)


def _layout_of_nibbles(described: Mapping[str, Any]) -> Found | None:
    if (said := tools.compressed(described)) and said.form == "pack-quantized":
        return tools.in_groups(
            said.block, said.weights, said.problems, storage=_BY_NIBBLES, name="compressed-tensors int4",
            weight="weight_packed", scale="weight_scale", zero="weight_zero_point", order="weight_g_idx",
            others=("weight_shape", *tools.OF_ACTIVATIONS),
            is_scattered=said.weights.get("actorder") in tools.SCATTERED,
        )  # fmt: skip
    described, problems = tools.of_auto_round(described)
    match described.get("quant_method"):
        case tools.GPTQ if described.get("bits") != 8:  # noqa: PLR2004 - a byte
            found = tools.gptq(described, {"bits": 4}, storage=_BY_NIBBLES, name="gptq int4")
        case tools.AWQ:
            version = described.get("version") or "gemm"
            odd = [*tools.differences(described, {"bits": 4, "zero_point": True})]
            odd += [] if str(version).lower() == "gemm" else [f"version {shown(version)}"]
            found = tools.in_groups(
                tools.grouped(described.get("group_size")), described, odd, storage=_BY_NIBBLES, name="awq int4",
                weight="qweight", scale="scales", zero="qzeros", has_inputs_first=True, joins_outputs=True,
            )  # fmt: skip
        case _:
            return None
    return problems + found if isinstance(found, list) else problems or found


INT4_WEIGHT_ONLY = of_few_rows(
    _BY_NIBBLES,
    order=4,
    short_name="int4wo",
    layout=_layout_of_nibbles,
    reader="llama_ssp.weights.packed_files:Int4Tensor",
    kernel="llama_ssp.models.quantization.weight_only:int4_weight_only_linear",
    compiled=Product("nibbles", "nibbles", ("avx512f",), INT4_GROUPS[-1]),
    weight_bytes=0.5,
    groups=INT4_GROUPS,
    loading_copies=4,  # codes are bytes on the way
    change_weight=5,
)

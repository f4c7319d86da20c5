"""Integers of 8 bits: LLM.int8(), which quantizes inputs too, weights alone by outputs, and weights alone by groups.

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
_BY_OUTPUTS, _BY_GROUPS = "int8_weight_only", "int8_groups"
_PER_OUTPUT: tuple[Block, ...] = ((1, None), (None, None))
"""Blocks without a border within a row."""
_SLOWDOWN = 4.0  # Relative to fp16 on GPUs: 3-5x as published, nearly constant from 1 to K + 1 rows.


def _layout(described: Mapping[str, Any]) -> Found | None:
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
    found = tools.gptq(described, problems, {"sym": True, "desc_act": False}, storage=_BY_GROUPS, name="gptq int8")
    if isinstance(found, PackedLayout) and found.block[1] is None:
        return replace(found, storage=_BY_OUTPUTS, group=0)
    return found


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
    layout=_layout,
    reader="llama_ssp.weights.block_files:ByteTensor",
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

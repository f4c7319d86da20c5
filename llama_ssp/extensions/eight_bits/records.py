"""The records of weights in a byte each: int8 with a scale per output or per group, and E4M3, a float of 8 bits.

E4M3 has an fp32 scale per 128 weights, and is for checkpoints that are stored so.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.errors import shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import (
    FP8_GROUP,
    INT4_GROUPS,
    OF_FEW_ROWS,
    WORD_BYTES,
    Block,
    Cost,
    Files,
    Found,
    PackedLayout,
    Packing,
    Product,
    StorageFormat,
)

BNB_FORM = "weight_format"
"""Last part of the name of a tensor that says in which order int8 weights are stored; 0 is row by row."""
_BY_OUTPUTS, _BY_GROUPS, _FP8 = "int8_weight_only", "int8_groups", "fp8_weight_only"
_PER_OUTPUT: tuple[Block, ...] = ((1, None), (None, None))
"""Blocks of which each holds whole rows."""


def _layout(described: Mapping[str, Any]) -> Found | None:
    if (said := tools.compressed(described)) and said.form in ("packed bytes", "int-quantized"):
        problems = said.problems + (["symmetric false"] if said.weights.get("symmetric") is False else [])
        if said.block not in _PER_OUTPUT:
            problems.append(f"strategy {shown(said.weights.get('strategy'))}")
        return problems or PackedLayout(
            name="compressed-tensors int8",
            storage=_BY_OUTPUTS,
            block=said.block or _PER_OUTPUT[0],
            scale="weight_scale",
            weight="weight_packed" if said.form == "packed bytes" else "weight",
            others=("weight_shape", *tools.OF_ACTIVATIONS),
        )
    if described.get("quant_method") == tools.BITSANDBYTES and described.get("load_in_8bit") is True:
        wanted = {"load_in_4bit": False}
        return [*tools.differences(wanted | {**described}, wanted)] or PackedLayout(
            name="bitsandbytes int8",
            storage=_BY_OUTPUTS,
            block=(1, None),
            weight="weight",
            scale="SCB",
            others=(BNB_FORM,),
            steps=127,
        )
    described, problems = tools.of_auto_round(described)
    if described.get("quant_method") != tools.GPTQ or described.get("bits") != 8:
        return None
    found = tools.gptq(described, problems, {"sym": True, "desc_act": False}, storage=_BY_GROUPS, name="gptq int8")
    if isinstance(found, PackedLayout) and found.block[1] is None:
        return replace(found, storage=_BY_OUTPUTS, group=0)
    return found


_FILES = Files(reader="llama_ssp.extensions.eight_bits.files:ByteTensor", stored_kind="I8")
INT8_WEIGHT_ONLY = StorageFormat(
    name=_BY_OUTPUTS,
    order=3,
    short_name="int8wo",
    kernel="llama_ssp.extensions.eight_bits.linear:int8_weight_only_linear",
    packing=Packing(weight_bytes=1, row_bytes=WORD_BYTES),
    cost=OF_FEW_ROWS,
    files=replace(
        _FILES,
        layout=_layout,
        counted_bits=8,
        reads="int8 with a scale per output or matrix (compressed-tensors int-quantized, pack-quantized; bitsandbytes) "
        "or per group without zeros (gptq)",
    ),
    compiled=Product("bytes", "bytes"),
    fp32_on_cpus=True,
    one_gpu_per_rank=True,
    has_published_times=True,
    change_weight=3,
)
INT8_GROUPS = StorageFormat(  # a scale per group; every product unpacks the matrix
    name=_BY_GROUPS,
    order=9,
    kernel="llama_ssp.extensions.eight_bits.linear:int8_groups_linear",
    packing=Packing(weight_bytes=1, groups=INT4_GROUPS),
    cost=Cost(
        gpu_read_bytes=lambda _rows, packed, unquantized, _slowdown: packed + 2 * unquantized,
        gpu_unpacks=OF_FEW_ROWS.gpu_unpacks,
    ),
    files=_FILES,
    one_gpu_per_rank=True,
    is_stored_alone=True,
)


def _fp8_layout(described: Mapping[str, Any]) -> Found | None:
    if (said := tools.compressed(described)) and said.form == "float-quantized":
        return _in_blocks(said.block, said.problems, name="compressed-tensors fp8")
    match described.get("quant_method"):
        case "fp8":
            block = described.get("weight_block_size")
            return _in_blocks((None, None) if block is None else tools.pair(block), [], name="fp8")
        case "fbgemm_fp8":
            return _in_blocks((1, None), [], name="fbgemm fp8")
        case tools.MODELOPT if described.get("quant_algo") == "FP8":
            return _in_blocks((None, None), [], name="modelopt fp8")
        case _:
            return None


def _in_blocks(block: Block | None, problems: list[str], *, name: str) -> Found:
    if block is None or (block[1] or FP8_GROUP) % FP8_GROUP:
        problems = [*problems, f"blocks of {shown(block and block[1])} inputs"]
    return problems or PackedLayout(
        name=name,
        storage=_FP8,
        block=block or (None, None),
        weight="weight",
        group=FP8_GROUP if block and block[1] else 0,
        scale="weight_scale",
        others=tools.OF_ACTIVATIONS,
    )


FP8_WEIGHT_ONLY = StorageFormat(
    name=_FP8,
    order=5,
    short_name="fp8wo",
    kernel="llama_ssp.extensions.eight_bits.linear:fp8_weight_only_linear",
    packing=Packing(weight_bytes=1, groups=(FP8_GROUP,)),
    cost=OF_FEW_ROWS,
    files=Files(
        layout=_fp8_layout,
        reader=_FILES.reader,
        stored_kind="F8_E4M3",
        reads="FP8 (fp8, fbgemm_fp8, compressed-tensors float-quantized)",
    ),
    compiled=Product("fp8", "e4m3", ("f16c",), FP8_GROUP),
    fp32_on_cpus=True,
    one_gpu_per_rank=True,
)

"""Floats of 8 and 4 bits, most of them for checkpoints alone.

    fp8_weight_only    E4M3, and an fp32 scale per 128 weights
    mxfp4, nvfp4       E2M1, and a power of two per 32 weights, or E4M3 per 16; both with a scale per output too
    nf4, fp4           those of bitsandbytes, with an fp32 scale per 64 weights: NormalFloat, and E2M1

Source: Dettmers et al. 2023, arXiv:2305.14314 (nf4).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.errors import shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import (
    BITSANDBYTES,
    FP4_GROUP,
    FP8_GROUP,
    NF4_GROUP,
    WORD_BYTES,
    Block,
    Found,
    PackedLayout,
    Product,
    StorageFormat,
    of_few_rows,
)

_FP8 = "fp8_weight_only"
_SCALED = {"mxfp4": 32, "nvfp4": 16}
"""Inputs that share a scale."""
BNB_STATE = "weight.quant_state.bitsandbytes__"
"""The prefix of the kind in the last part of the name of a tensor with JSON."""


def _layout_of_fp8(described: Mapping[str, Any]) -> Found | None:
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
        name=name, storage=_FP8, block=block or (None, None), weight="weight",
        group=FP8_GROUP if block and block[1] else 0, scale="weight_scale", others=tools.OF_ACTIVATIONS,
    )  # fmt: skip


FP8_WEIGHT_ONLY = of_few_rows(
    _FP8,
    order=5,
    short_name="fp8wo",
    layout=_layout_of_fp8,
    reader="llama_ssp.weights.packed_files:ByteTensor",
    kernel="llama_ssp.models.quantization.weight_only:fp8_weight_only_linear",
    compiled=Product("fp8", "e4m3", ("f16c",), FP8_GROUP),
    stored_kind="F8_E4M3",
    weight_bytes=1,
    groups=(FP8_GROUP,),
)


def _layout_of_e2m1(described: Mapping[str, Any]) -> Found | None:
    said = tools.compressed(described)
    if said and (storage := said.form.removesuffix("-pack-quantized")) in _SCALED:
        return _scaled(
            said.block, said.problems, storage=storage, name=f"compressed-tensors {storage}", weight="weight_packed",
            factor="weight_global_scale" if storage == "nvfp4" else "", divides=True,
        )  # fmt: skip
    if described.get("quant_method") == "mxfp4":
        return _scaled((1, 32), [], storage="mxfp4", name="mxfp4", weight="_blocks", scale="_scales", joint="")
    if described.get("quant_method") != tools.MODELOPT or described.get("quant_algo") == "FP8":
        return None
    weights = tools.weights_of(described) or [described]
    if (algorithm := described.get("quant_algo")) != "NVFP4" or len(weights) > 1:
        return [f"quant_algo {shown(algorithm)} with {len(weights)} config_groups"]
    return _scaled(
        tools.grouped(tools.field_of(weights[0], "group_size")), [], storage="nvfp4", name="modelopt nvfp4",
        weight="weight", factor="weight_scale_2",
    )  # fmt: skip


def _scaled(
    block: Block | None,
    problems: list[str],
    *,
    storage: str,
    **layout: Any,  # noqa: ANN401 - its fields
) -> Found:
    if block != (1, _SCALED[storage]):
        problems = [*problems, f"group_size {shown(block and block[1])}"]
    layout = {"scale": "weight_scale", "others": tools.OF_ACTIVATIONS} | layout
    return problems or PackedLayout(storage=storage, block=block or (1, None), group=FP4_GROUP, **layout)


MXFP4 = of_few_rows(
    "mxfp4",
    order=7,
    layout=_layout_of_e2m1,
    reader="llama_ssp.weights.packed_files:Fp4Tensor",
    kernel="llama_ssp.models.quantization.weight_only:mxfp4_linear",
    compiled=Product("mxfp4", "e2m1", ("avx512f", "f16c"), FP4_GROUP, _SCALED["mxfp4"], "float8_e8m0fnu"),
    stored_kind="U8",
    weight_bytes=0.5,
    row_bytes=WORD_BYTES,
    word_bytes=1,
    groups=(FP4_GROUP,),
    is_stored_alone=True,
)
NVFP4 = replace(
    MXFP4, name="nvfp4", order=8, layout=None, kernel="llama_ssp.models.quantization.weight_only:nvfp4_linear",
    compiled=MXFP4.product._replace(kind="nvfp4", scaled=_SCALED["nvfp4"], scale_dtype="float8_e4m3fn"),
    stored_kind="F8_E4M3", word_bytes=2,
)  # fmt: skip


def _layout_of_bnb(described: Mapping[str, Any]) -> Found | None:
    if described.get("quant_method") != tools.BITSANDBYTES or described.get("load_in_8bit") is True:
        return None
    wanted: dict[str, object] = {"load_in_4bit": True}
    kind = described.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        wanted["bnb_4bit_quant_type"] = "nf4"
    if described.get("bnb_4bit_quant_storage") is not None:
        wanted["bnb_4bit_quant_storage"] = "uint8"
    return [*tools.differences(described, wanted)] or PackedLayout(
        name=f"bitsandbytes {kind}", storage=kind, block=(1, NF4_GROUP), group=NF4_GROUP, weight="weight",
        scale="weight.absmax",
        others=("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", f"{BNB_STATE}{kind}"),
    )  # fmt: skip


def _read_bytes(rows: int, packed: int, unquantized: int) -> float:
    """The kernel for one row is no faster than fp16; for more rows the matrix is unpacked, written and read again."""
    return unquantized if rows == 1 else packed + 2 * unquantized


NF4 = StorageFormat(
    name="nf4",
    order=2,
    layout=_layout_of_bnb,
    reader="llama_ssp.weights.packed_files:BnbTensor",
    kernel="llama_ssp.models.quantization.precision:Nf4Linear",
    weight_bytes=0.5,
    unpacks_matrix=True,
    gpu_read_bytes=_read_bytes,
    groups=(NF4_GROUP,),
    package=BITSANDBYTES,
    package_bytes=90_000_000,  # measured on a Xeon with bitsandbytes 0.50.2: 87 to 96 MB
    change_weight=5,
)
FP4 = replace(
    NF4, name="fp4", order=6, layout=None, kernel="llama_ssp.models.quantization.precision:fp4_linear",
    change_weight=None,
)  # fmt: skip

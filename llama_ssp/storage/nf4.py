"""Floats of 4 bits of bitsandbytes, with an fp32 scale per 64 weights: NormalFloat, and for checkpoints fp4.

Source: Dettmers et al. 2023, arXiv:2305.14314.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.storage import tools
from llama_ssp.storage.formats import BITSANDBYTES, NF4_GROUP, Found, PackedLayout, StorageFormat

BNB_STATE = "weight.quant_state.bitsandbytes__"
"""The prefix of the kind in the last part of the name of a tensor with JSON."""


def _layout(described: Mapping[str, Any]) -> Found | None:
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
    layout=_layout,
    reader="llama_ssp.weights.float4_files:BnbTensor",
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

"""The records of bitsandbytes: LLM.int8(), which quantizes inputs too, and 4-bit floats with a scale per 64 weights.

The floats are NormalFloat (nf4) and, only in checkpoints that have it, fp4. Source: Dettmers et al. 2022,
arXiv:2208.07339, and 2023, arXiv:2305.14314.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.settings.aliases import Counterpart
from llama_ssp.storage import tools
from llama_ssp.storage.formats import (
    WORD_BYTES,
    Cost,
    Files,
    Found,
    Package,
    PackedLayout,
    Packing,
    Product,
    StorageFormat,
)
from llama_ssp.text.messages import installing

NF4_GROUP = 64
"""Inputs that share a word."""
BITSANDBYTES = Package("bitsandbytes", installing("bitsandbytes"))
_SLOWDOWN = 4.0  # Relative to fp16 on GPUs: 3-5x as published, nearly constant from 1 to K + 1 rows.
BNB_STATE = "weight.quant_state.bitsandbytes__"
"""The last part of the name of a tensor that holds JSON, without the kind, which follows it."""


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
        name=f"bitsandbytes {kind}",
        storage=kind,
        block=(1, NF4_GROUP),
        group=NF4_GROUP,
        weight="weight",
        scale="weight.absmax",
        others=("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", f"{BNB_STATE}{kind}"),
    )


def _read_bytes(rows: int, packed: int, unquantized: int, _slowdown: Mapping[str, float]) -> float:
    """Return the bytes that a product moves.

    For one row, the kernel is no faster than one in fp16; for more rows the matrix is unpacked, written and read again.
    """
    return unquantized if rows == 1 else packed + 2 * unquantized


NF4 = StorageFormat(
    name="nf4",
    order=2,
    kernel="llama_ssp.extensions.bitsandbytes.linear:Nf4Linear",
    packing=Packing(weight_bytes=0.5, groups=(NF4_GROUP,)),
    cost=Cost(gpu_read_bytes=_read_bytes, unpacks_matrix=True),
    files=Files(
        reads="bitsandbytes nf4 or fp4", layout=_layout, reader="llama_ssp.extensions.bitsandbytes.files:BnbTensor"
    ),
    # measured on a Xeon with bitsandbytes 0.50.2: 87 to 96 MB
    package=BITSANDBYTES._replace(process_bytes=90_000_000),
    change_weight=5,
)
FP4 = replace(
    NF4,
    name="fp4",
    order=6,
    kernel="llama_ssp.extensions.bitsandbytes.linear:fp4_linear",
    files=Files(reader=NF4.files.reader),
    change_weight=None,
)
INT8 = StorageFormat(
    name="int8",
    order=1,
    kernel="llama_ssp.extensions.bitsandbytes.linear:int8_linear",
    compiled=Product("dots", "dots", ("avx512vnni",)),
    packing=Packing(weight_bytes=1, row_bytes=WORD_BYTES),
    cost=Cost(gpu_read_bytes=lambda _rows, _packed, unquantized, _slowdown: _SLOWDOWN * unquantized),
    fp32_on_cpus=True,
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
COUNTERPART = Counterpart(
    "load_in_8bit load_in_4bit int8 bits",
    "model.quantization",
    "model.quantization=int8 or nf4 stores the target so, and draft.model.quantization the draft",
)

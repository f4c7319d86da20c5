"""E4M3, a float of 8 bits, and an fp32 scale per 128 weights: for checkpoints that are stored so."""

from collections.abc import Mapping
from typing import Any

from llama_ssp.errors import shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import FP8_GROUP, Block, Found, PackedLayout, Product, of_few_rows

_NAME = "fp8_weight_only"


def _layout(described: Mapping[str, Any]) -> Found | None:
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
        name=name, storage=_NAME, block=block or (None, None), weight="weight",
        group=FP8_GROUP if block and block[1] else 0, scale="weight_scale", others=tools.OF_ACTIVATIONS,
    )  # fmt: skip


FP8_WEIGHT_ONLY = of_few_rows(
    _NAME,
    order=5,
    short_name="fp8wo",
    layout=_layout,
    reader="llama_ssp.weights.block_files:ByteTensor",
    kernel="llama_ssp.models.quantization.weight_only:fp8_weight_only_linear",
    compiled=Product("fp8", "e4m3", ("f16c",), FP8_GROUP),
    stored_kind="F8_E4M3",
    weight_bytes=1,
    groups=(FP8_GROUP,),
)

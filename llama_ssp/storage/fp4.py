"""E2M1, a float of 4 bits, for checkpoints alone: MXFP4, a power of two per 32 weights, and NVFP4, E4M3 per 16.

Both have a scale per output too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.errors import shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import FP4_GROUP, WORD_BYTES, Block, Found, PackedLayout, Product, of_few_rows

_SCALED = {"mxfp4": 32, "nvfp4": 16}
"""Inputs that share a scale."""


def _layout(described: Mapping[str, Any]) -> Found | None:
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
    layout=_layout,
    reader="llama_ssp.weights.float4_files:Fp4Tensor",
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

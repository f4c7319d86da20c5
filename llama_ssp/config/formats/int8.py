"""LLM.int8() of bitsandbytes: one byte per weight, an fp32 scale per output; inputs are quantized too.

Source: Dettmers et al. 2022, arXiv:2208.07339.
"""

from llama_ssp.config.formats.bitsandbytes_package import BITSANDBYTES, SCALE_BYTES
from llama_ssp.config.formats.format import StorageFormat

SLOWDOWN = 4.0
"""Relative to fp16 on GPUs: 3-5x as published, nearly constant from 1 to K + 1 rows."""

FORMAT = StorageFormat(
    name="int8",
    order=1,
    kernel="llama_ssp.models.quantization.precision:Int8Linear",
    settings={"int8_threshold": "threshold"},
    matrix_bytes=lambda num_weights, value_bytes: num_weights,  # noqa: ARG005
    row_bytes=lambda value_bytes: SCALE_BYTES,  # noqa: ARG005
    fp32_on_cpus=True,
    gpu_read_bytes=lambda rows, packed, unquantized: SLOWDOWN * unquantized,  # noqa: ARG005
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

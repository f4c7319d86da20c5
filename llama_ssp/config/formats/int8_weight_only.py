"""Our own weight-only format: one byte per weight, and a scale per output in the model's number format."""

from llama_ssp.config.formats.few_rows import UNPACKED_WEIGHTS, gpu_read_bytes
from llama_ssp.config.formats.format import StorageFormat

FORMAT = StorageFormat(
    name="int8_weight_only",
    order=3,
    short_name="int8wo",
    kernel="llama_ssp.models.quantization.weight_only:Int8WeightOnlyLinear",
    matrix_bytes=lambda num_weights, value_bytes: num_weights,  # noqa: ARG005
    row_bytes=lambda value_bytes: value_bytes,
    fp32_on_cpus=True,
    gpu_read_bytes=gpu_read_bytes,
    gpu_unpacks=UNPACKED_WEIGHTS,
    one_gpu_per_rank=True,
    change_weight=3,
)

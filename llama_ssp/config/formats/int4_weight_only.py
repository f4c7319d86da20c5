"""Half a byte per weight, and a word of 4 bytes per 128 weights; also read from checkpoints that are packed already."""

from llama_ssp.config.formats.few_rows import UNPACKED_WEIGHTS, gpu_read_bytes
from llama_ssp.config.formats.format import StorageFormat

GROUP = 128
"""Inputs that share a scale and a zero: what public checkpoints have."""
WORD_BYTES = 4


def _matrix_bytes(num_weights: int, value_bytes: int) -> int:  # noqa: ARG001 - the number format does not matter
    return -(-num_weights // 2) + WORD_BYTES * -(-num_weights // GROUP)


FORMAT = StorageFormat(
    name="int4_weight_only",
    order=4,
    short_name="int4wo",
    kernel="llama_ssp.models.quantization.int4_weight_only:Int4WeightOnlyLinear",
    matrix_bytes=_matrix_bytes,
    fp32_on_cpus=True,
    gpu_read_bytes=gpu_read_bytes,
    gpu_unpacks=UNPACKED_WEIGHTS,
    group=GROUP,
    reads_packed=True,
    one_gpu_per_rank=True,
    change_weight=5,
)

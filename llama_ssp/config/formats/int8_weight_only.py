"""Our own weight-only format: one byte per weight, and a scale per output in the model's number format."""

from llama_ssp.config.formats.format import StorageFormat

FEW_ROWS = 64
"""Rows up to which a GPU's kernel multiplies by the bytes as they are; for more the matrix is unpacked.

Unpacking moves 5 bytes of memory per weight: it reads 1, writes 2, and reads 2. The kernel computes up to 32 rows at a
time and moves through the L2 cache, at about the speed of the memory, 1 byte of weights and 2 of inputs per weight.
"""


def _gpu_read_bytes(rows: int, packed: int, unquantized: int) -> float:
    """The kernel reads the bytes alone; beyond its rows the matrix is unpacked, written and read again."""
    return packed if rows <= FEW_ROWS else packed + 2 * unquantized


FORMAT = StorageFormat(
    name="int8_weight_only",
    order=3,
    short_name="int8wo",
    kernel="llama_ssp.models.quantization.weight_only:Int8WeightOnlyLinear",
    matrix_bytes=lambda num_weights, value_bytes: num_weights,  # noqa: ARG005
    row_bytes=lambda value_bytes: value_bytes,
    gpu_read_bytes=_gpu_read_bytes,
    one_gpu_per_rank=True,
)

"""Our own weight-only format: one byte per weight, and a scale per output in the model's number format."""

from llama_ssp.config.formats.format import StorageFormat

ROWS_OF_A_PASS = 32
"""Rows that a GPU's kernel computes while it reads the weights once."""
FEW_ROWS = 2 * ROWS_OF_A_PASS
"""Rows up to which a GPU's kernel multiplies by the bytes as they are; for more the matrix is unpacked.

Derived, not measured. Unpacking moves 5 bytes of memory for a weight: it reads 1, writes 2 and reads 2. A pass of the
kernel moves at most 3 through the L2 cache, which is faster: 1 of weights, and 2 of inputs (32 rows for 32 outputs).
"""


def _gpu_read_bytes(rows: int, packed: int, unquantized: int) -> float:
    """The kernel reads the bytes in every pass; beyond its rows the matrix is unpacked, written and read again."""
    return packed * -(-rows // ROWS_OF_A_PASS) if rows <= FEW_ROWS else packed + 2 * unquantized


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

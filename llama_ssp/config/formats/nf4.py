"""The 4-bit NormalFloat of bitsandbytes: half a byte per weight, and an fp32 scale per 64 weights.

Source: Dettmers et al. 2023, arXiv:2305.14314.
"""

from llama_ssp.config.formats.bitsandbytes_package import BITSANDBYTES, SCALE_BYTES
from llama_ssp.config.formats.format import StorageFormat

GROUP = 64


def _matrix_bytes(num_weights: int, value_bytes: int) -> int:  # noqa: ARG001 - the number format does not matter
    return -(-num_weights // 2) + SCALE_BYTES * -(-num_weights // GROUP)


def _gpu_read_bytes(rows: int, packed: int, unquantized: int) -> float:
    """The kernel for one row is no faster than fp16; for more rows the matrix is unpacked, written and read again."""
    return unquantized if rows == 1 else packed + 2 * unquantized


FORMAT = StorageFormat(
    name="nf4",
    order=2,
    kernel="llama_ssp.models.quantization.precision:Nf4Linear",
    matrix_bytes=_matrix_bytes,
    unpacks_matrix=True,
    gpu_read_bytes=_gpu_read_bytes,
    group=GROUP,
    package=BITSANDBYTES,
    change_weight=5,
)

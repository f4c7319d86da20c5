"""The cost of our GPU kernel for a few rows, which two formats share."""

ROWS_OF_A_PASS = 32
"""Rows that the kernel computes while it reads the weights once."""
FEW_ROWS = 2 * ROWS_OF_A_PASS
"""Rows up to which the kernel multiplies by the packed weights as they are; for more the matrix is unpacked.

Derived, not measured. Unpacking an int8 weight moves 5 bytes of memory: it reads 1, writes 2 and reads 2. A pass of the
kernel moves at most 3 through the L2 cache, which is faster: 1 of weights, and 2 of inputs (32 rows for 32 outputs).
"""


def gpu_read_bytes(rows: int, packed: int, unquantized: int) -> float:
    """The kernel reads the weights in every pass; beyond its rows the matrix is unpacked, written and read again."""
    return packed * -(-rows // ROWS_OF_A_PASS) if rows <= FEW_ROWS else packed + 2 * unquantized

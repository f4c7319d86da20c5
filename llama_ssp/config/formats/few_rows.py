"""The cost of our GPU kernel for a few rows, which two formats share."""

ROWS_OF_A_PASS = 32
"""Rows that the kernel computes while it reads the weights once."""
FEW_ROWS = 4 * ROWS_OF_A_PASS
"""Rows up to which the kernel multiplies by the packed weights as they are; for more the matrix is unpacked.

Derived, not measured. Unpacking an int8 weight moves 5 bytes of memory: it reads 1, writes 2 and reads 2. Four passes
of the kernel move 4; each further one would move one more, and through the L2 cache two more of inputs.
"""
UNPACKED_WEIGHTS = 2**26
"""Weights that a GPU unpacks at a time, 128 MiB in 16 bits: a matrix of 65B in at most six steps."""


def gpu_read_bytes(rows: int, packed: int, unquantized: int) -> float:
    """The kernel reads the weights in every pass; beyond its rows the matrix is unpacked, written and read again."""
    return packed * -(-rows // ROWS_OF_A_PASS) if rows <= FEW_ROWS else packed + 2 * unquantized

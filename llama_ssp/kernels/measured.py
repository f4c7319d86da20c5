"""Where our products of a few rows with weights in fp16 and bf16 were faster than cuBLAS's (`docs/findings/gpus.md`).

Nothing is timed when a run starts: what is not listed here is left to cuBLAS.
"""

_MOST_ROWS = {"H100": 8, "H200": 8}
"""Of all matrices, by what the name of a GPU contains."""


def most_rows(gpu: str, num_outputs: int, num_inputs: int) -> int:
    """The most rows for which our product is faster on a GPU of this name; 0 for none."""
    return next((most for name, most in _MOST_ROWS.items() if name in gpu), 0)

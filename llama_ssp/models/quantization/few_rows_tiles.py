"""How the kernel for int8 and int4 cuts a product into blocks; knows no torch.

The figures follow from ptxas and from the memory: 32 outputs and 512 inputs are 16 KiB of int8 weights in a step, two
or three steps are on their way at a time, and a block fits into 99 KiB of shared memory, which every GPU since 2020
has. In int4 half as many warps read as many bytes each, so that a warp has one group of 128 inputs.

Shapes: M rows, I inputs, O outputs.
"""

from dataclasses import dataclass

WARP_BYTES = 64
"""Bytes that a warp reads of a row of weights in a step: two sectors of memory."""
STEP = 512
"""Inputs that all warps read in a step."""
_LEAST_SAVED = 4
"""Steps that a split must save, since it needs a second kernel; a step takes about a quarter of a microsecond."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a product is cut.

    Attributes:
        rows: of a block, padded.
        outputs: of a block.
        num_splits: over the inputs.
        split_inputs: of a split, a multiple of STEP.
        warp_inputs: of a warp in a step.
        num_warps: of a block.
        num_stages: steps on their way, and the one that is computed.
        grid: blocks over rows, outputs and splits.
    """

    rows: int
    outputs: int
    num_splits: int
    split_inputs: int
    warp_inputs: int
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]


def tiles_of(
    *, num_rows: int, num_outputs: int, num_inputs: int, num_processors: int, value_bytes: int, byte_weights: int = 1
) -> Tiles:
    """Cut a product for a GPU; only the tile of rows depends on the number of rows.

    Small matrices have small blocks. If these leave half of the multiprocessors idle, they are split over the inputs.

    Args:
        num_rows: M.
        num_outputs: O.
        num_inputs: I.
        num_processors: multiprocessors of the GPU.
        value_bytes: of an input.
        byte_weights: weights in a byte.
    """
    # In fp32 every output of a warp shares the splitting of its inputs into three.
    outputs = 32 if value_bytes > 2 or _ceil(num_outputs, 32) >= num_processors else 16  # noqa: PLR2004 - fp32
    num_steps = _ceil(num_inputs, STEP)
    split_steps = _ceil(num_steps, max(num_processors // _ceil(num_outputs, outputs), 1))
    if num_steps - split_steps < _LEAST_SAVED:
        split_steps = num_steps
    num_splits = _ceil(num_steps, split_steps)
    most_rows = 32 if value_bytes == 2 else 16  # noqa: PLR2004 - bytes of fp16 and bf16
    rows = next((rows for rows in (8, 16) if num_rows <= rows), most_rows)
    return Tiles(
        rows=rows, outputs=outputs, num_splits=num_splits, split_inputs=split_steps * STEP,
        warp_inputs=WARP_BYTES * byte_weights, num_warps=STEP // (WARP_BYTES * byte_weights),
        num_stages=4 if rows * value_bytes <= 32 else 3,  # noqa: PLR2004 - 99 KiB
        grid=(_ceil(num_rows, rows), _ceil(num_outputs, outputs), num_splits),
    )  # fmt: skip


def _ceil(number: int, by: int) -> int:
    return -(-number // by)

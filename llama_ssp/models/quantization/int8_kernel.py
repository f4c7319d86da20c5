"""A Triton kernel for the product of a few rows with an int8 matrix; torch's own is far below memory bandwidth.

Each program computes some outputs of all rows and reads its weights once, so that K + 1 rows cost as much as one. Rows
are padded to one tile, so that a row's result does not depend on the number of rows.

Shapes: M rows, I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
_OUTPUTS, _INPUTS = 16, 256


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917 - Triton's own language
    x, weight, scales, y, num_rows, num_outputs, num_inputs,  # noqa: ANN001
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of (ROWS, OUTPUTS): loop over blocks of inputs, then scale the sum."""
    rows = tl.arange(0, ROWS)
    outputs = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = inputs < num_inputs
        x_tile = tl.load(
            x + rows[:, None] * num_inputs + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        bytes_tile = tl.load(
            weight + outputs[:, None] * num_inputs + inputs[None, :],
            mask=is_output[:, None] & is_input[None, :],
            other=0,
        )
        total = tl.dot(x_tile, tl.trans(bytes_tile.to(x_tile.dtype)), total, input_precision="ieee")
    scaled = total * tl.load(scales + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = y + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(places, scaled.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def product_of_few_rows(x_MI: Tensor, weight_OI: Tensor, scales_O: Tensor) -> Tensor:
    """Compute x (W s)^T for at most ROWS rows; x and s in fp32, bf16 or fp16, W in int8 and contiguous."""
    num_outputs, num_inputs = weight_OI.shape
    x_MI = x_MI.contiguous()
    y_MO = torch.empty(x_MI.shape[0], num_outputs, dtype=x_MI.dtype, device=x_MI.device)
    _kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x_MI, weight_OI, scales_O, y_MO, x_MI.shape[0], num_outputs, num_inputs,
        ROWS=ROWS, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, num_warps=4, num_stages=4,
    )  # fmt: skip
    return y_MO

"""The product of few rows with 16-bit weights and all that stands around it, in Triton: `gpu_kernels=fused`.

It computes x W^T with the RMS norm before it, which may add the sum of the ranks to x, and the bias and the gate of the
MLP behind it; cuBLAS adds the residual itself. For few rows a product reads its weights and hardly computes, so what
surrounds it is free, where a kernel of its own costs a launch and a trip through memory. Each program computes some
outputs of all rows and reads each of its weights once. No GPU has timed it, so it is off by default.

Shapes: M rows, I inputs, O outputs.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.kernels.between import RmsNorm

OUTPUTS, INPUTS, NUM_STAGES = 32, 128, 5
"""Outputs of a program, inputs of a step, and steps in flight."""
_LEAST_ROWS = 16
"""What one instruction multiplies; fewer rows are padded."""
_SMALLEST_EXPONENT = -14
"""Of normal numbers in fp16."""


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x, added, summed, norm, weight, bias, y,
    num_rows, num_outputs, num_inputs, eps, unscale,
    GATES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile (ROWS, OUTPUTS) of y; the first program also stores x + added to `summed`.

    With GATES the weight has 2 O rows, gate and up, and y is silu(gate) * up.
    """
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    # Gate and up take turns, so that one product computes both.
    NUM: tl.constexpr = 2 if GATES else 1
    columns = tl.program_id(0) * OUTPUTS * NUM + tl.arange(0, OUTPUTS * NUM)
    is_column = columns // NUM < num_outputs
    weight_rows = (columns % NUM) * num_outputs + columns // NUM
    places = rows[:, None].to(tl.int64) * num_inputs
    begins = weight_rows[:, None].to(tl.int64) * num_inputs
    total = tl.zeros((ROWS, OUTPUTS * NUM), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = inputs < num_inputs
        is_here = is_row[:, None] & is_input[None, :]
        weights = tl.load(weight + begins + inputs[None, :], mask=is_column[:, None] & is_input[None, :], other=0.0)
        x_tile = tl.load(x + places + inputs[None, :], mask=is_here, other=0.0)
        if added is not None:
            x_tile += tl.load(added + places + inputs[None, :], mask=is_here, other=0.0)
            tl.store(summed + places + inputs[None, :], x_tile, mask=is_here & (tl.program_id(0) == 0))
        exact = x_tile.to(tl.float32)
        squares += tl.sum(exact * exact, 1)
        factors = tl.load(norm + inputs, mask=is_input, other=0.0).to(tl.float32)
        x_tile = (exact * factors[None, :]).to(x_tile.dtype)
        total = tl.dot(x_tile, tl.trans(weights), total)
    total *= (tl.rsqrt(squares / num_inputs + eps) * unscale)[:, None]
    if bias is not None:
        total += tl.load(bias + weight_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if GATES:
        gate, up = tl.split(tl.reshape(total, (ROWS, OUTPUTS, 2)))
        # Rounded as the separate product would be.
        gate = gate.to(y.dtype.element_ty).to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * up.to(y.dtype.element_ty).to(tl.float32)
    here = rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(y + here, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def product(
    norm: RmsNorm, weight_OI: Tensor, bias_O: Tensor | None, *, gates: bool, dtype: torch.dtype | None
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """The product for few rows: maps x and what is added to it to their sum and norm(sum) W^T + bias.

    With `gates` the weight is that of gate and up, one after the other, and the result silu(gate) * up. `dtype` is that
    of the result, None for that of x. All tensors are contiguous.
    """
    # No product of a finite x with the scaled weight overflows.
    scale = 2.0 ** -math.ceil(math.log2(max(float(norm.weight_E.abs().max()), 2.0**_SMALLEST_EXPONENT)))
    scaled_I, num_outputs = norm.weight_E * scale, weight_OI.shape[0] // (1 + gates)

    def multiply(x_MI: Tensor, added_MI: Tensor | None) -> tuple[Tensor, Tensor]:
        num_rows, num_inputs = x_MI.shape
        summed_MI = x_MI if added_MI is None else torch.empty_like(x_MI)
        y_MO = x_MI.new_empty(num_rows, num_outputs, dtype=dtype)
        product_kernel[(triton.cdiv(num_outputs, OUTPUTS),)](
            x_MI, added_MI, summed_MI, scaled_I, weight_OI, bias_O, y_MO,
            num_rows, num_outputs, num_inputs, norm.eps, 1 / scale,
            GATES=gates, ROWS=max(int(triton.next_power_of_2(num_rows)), _LEAST_ROWS), OUTPUTS=OUTPUTS, INPUTS=INPUTS,
            num_warps=4, num_stages=NUM_STAGES,
        )  # fmt: skip
        return summed_MI, y_MO

    return multiply

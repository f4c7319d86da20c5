"""Triton kernels for products of a few rows with weights in fp16 or bf16, where cuBLAS is below the memory's speed.

    rows       kernel                                       the weights of a block, and how they arrive
    1          `row_kernel`, by fused multiply-add          8 outputs x 1024 inputs in registers, one step ahead
    2 to 16    `linear`, as for 8 and 4 bits                16 outputs x 512 inputs in shared memory, two steps ahead

`row_kernel` reads its first weights while the kernel before it ends. Where its last few blocks would run alone, the
kernel of `linear` computes a single row too. From 2 rows on, the bits of a row do not depend on other rows.
`find_halves` decides where both are used.

Shapes: M rows, I inputs, O outputs.
"""

import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.extensions.gpu.kernels.chain import chained, release, wait
from llama_ssp.extensions.gpu.kernels.linear import product_of_few_rows, store

_OUTPUTS, _INPUTS, _NUM_WARPS = 8, 1024, 4
_UNEVEN = range(6337, 8870)
"""Outputs that are a few more than run at once, in six blocks on each of 132 multiprocessors."""


@triton.jit  # type: ignore[untyped-decorator]
def row_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    residual,
    y,
    num_outputs,
    num_inputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some outputs of one row; a thread adds 8 neighbours of each step at once."""
    outputs, inputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    # Rows of the weight after the last one are read as the last one, and not stored.
    read = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    places = weight + (read * num_inputs)[:, None] + inputs[None, :]
    coming = tl.load(places, mask=(inputs < num_inputs)[None, :], other=0.0, eviction_policy="evict_first")
    wait(PDL)
    total = tl.zeros((OUTPUTS, INPUTS // 8), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        weight_tile = coming.to(tl.float32)
        is_coming = (inputs < num_inputs - start - INPUTS)[None, :]
        coming = tl.load(places + start + INPUTS, mask=is_coming, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x + start + inputs, mask=inputs < num_inputs - start, other=0.0).to(tl.float32)
        total += tl.sum(tl.reshape(weight_tile * x_tile[None, :], (OUTPUTS, INPUTS // 8, 8)), 2)
    release(PDL)
    store(tl.sum(total, 1), None, bias, residual, y, outputs, outputs, outputs < num_outputs)


def product_of_halves(
    x_MI: Tensor, weight_OI: Tensor, *, bias_O: Tensor | None = None, residual_MO: Tensor | None = None
) -> Tensor:
    """Compute x W^T + bias + residual, rounded once, for 1 to 16 rows of a contiguous weight, all in one dtype."""
    num_outputs, num_inputs = weight_OI.shape
    if len(x_MI) > 1 or num_outputs in _UNEVEN:
        return product_of_few_rows(x_MI, weight_OI, bias_O=bias_O, residual_MO=residual_MO)
    y_MO = x_MI.new_empty(1, num_outputs)
    residual_MO = None if residual_MO is None else residual_MO.contiguous()
    row_kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x_MI.contiguous(),
        weight_OI,
        bias_O,
        residual_MO,
        y_MO,
        num_outputs,
        num_inputs,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        num_warps=_NUM_WARPS,
        **chained(x_MI.device),
    )
    return y_MO

"""The int8 kernel without a GPU: its values in Triton's interpreter, and what ptxas makes of it."""

import os
import subprocess
import sys
from functools import cache

import pytest
import torch

from tests.helpers.ahead_of_time import CAPABILITIES, Compiled, compile_kernel
from tests.helpers.lanes import grid
from tests.helpers.ptx import run_ptx

pytestmark = pytest.mark.triton

MOST_INSTRUCTIONS = 6
"""Of a thread, for each weight. While a byte arrives, an H200 has time for 6, an H100 for 8 and an A100 for 9."""
MOST_SHARED = 99 * 1024
"""Bytes of a block on GPUs since 2020."""
TYPES = {
    "x": "*{}", "weight": "*i8", "scales": "*{}", "residual": "*{}", "y": "*{}",
    "num_rows": "i32", "num_outputs": "i32", "num_inputs": "i32", "split_inputs": "i32",
}  # fmt: skip
VALUE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


@cache
def compiled(capability: int, dtype: str, num_rows: int, *, num_outputs: int = 8192) -> Compiled:
    """The kernel as it is called for a matrix with 4096 inputs on an H200."""
    from llama_ssp.models.quantization import int8_kernel
    from llama_ssp.models.quantization.int8_tiles import INPUTS, NUM_WARPS, tiles_of

    tiles = tiles_of(
        num_rows=num_rows, num_outputs=num_outputs, num_inputs=4096, num_processors=132, value_bytes=VALUE_BYTES[dtype]
    )
    constants = {
        "ROWS": tiles.rows, "OUTPUTS": tiles.outputs, "INPUTS": INPUTS, "WARPS": NUM_WARPS,
        "IS_SPLIT": tiles.num_splits > 1, "PTX": True, "bias": None,
    }  # fmt: skip
    types = {name: kind.format(dtype) for name, kind in TYPES.items()}
    if tiles.num_splits > 1:
        types["y"] = "*fp32"
    return compile_kernel(
        int8_kernel._product, types, constants, capability=capability, num_warps=NUM_WARPS,
        num_stages=tiles.num_stages, uneven=["num_rows"],
    )  # fmt: skip


def num_weights(found: Compiled, dtype: str, *, num_outputs: int) -> int:
    """Weights of a warp in a step, if no other warp has them too."""
    from llama_ssp.models.quantization.int8_tiles import STEP, tiles_of

    tiles = tiles_of(
        num_rows=1, num_outputs=num_outputs, num_inputs=4096, num_processors=132, value_bytes=VALUE_BYTES[dtype]
    )
    return tiles.outputs * STEP // found.num_warps


every_variant = grid(capability=CAPABILITIES, dtype=list(VALUE_BYTES), num_rows=[5, 16, 20])


@every_variant
def test_no_register_is_spilled_and_a_block_fits(capability: int, dtype: str, num_rows: int) -> None:
    found = compiled(capability, dtype, num_rows)
    assert found.stack_bytes == 0
    assert found.shared_bytes <= MOST_SHARED


@every_variant
def test_every_weight_is_multiplied_once_and_never_converted_as_an_integer(
    capability: int, dtype: str, num_rows: int
) -> None:
    """A warp that did what another one does would double its products."""
    found = compiled(capability, dtype, num_rows)
    assert not found.count(r"\bI2F")
    num_tiles = num_weights(found, dtype, num_outputs=8192) // (16 * 16)
    tiles_of_rows = {5: 1, 16: 2, 20: 4 if dtype != "fp32" else 2}[num_rows]
    assert found.count(r"\bHMMA\.16816\.F32") == num_tiles * tiles_of_rows * (3 if dtype == "fp32" else 1)


@grid(capability=CAPABILITIES, dtype=list(VALUE_BYTES), num_outputs=[8192, 2048, 512])
def test_a_weight_takes_few_instructions(capability: int, dtype: str, num_outputs: int) -> None:
    found = compiled(capability, dtype, 5, num_outputs=num_outputs)
    assert 32 * len(found.body) <= MOST_INSTRUCTIONS * num_weights(found, dtype, num_outputs=num_outputs)


INTERPRETED = """
import numpy, torch, triton.language as tl
from triton.runtime import interpreter
from llama_ssp.models.quantization.int8_kernel import product_of_few_rows

create_dot = interpreter.InterpreterBuilder.create_dot

def widened(handle):  # the interpreter keeps bf16 as its bits
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

def dot(self, a, b, *others):
    return create_dot(self, widened(a), widened(b), *others)

interpreter.InterpreterBuilder.create_dot = dot
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for num_outputs, num_inputs in ((33, 80), (20, 2100)):
        weight = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
        scales = (2.0 ** -torch.randint(3, 9, (num_outputs,))).to(dtype)
        x = (torch.randint(-8, 9, (40, num_inputs)) / 8).to(dtype)
        wanted = (x.double() @ weight.double().t()) * scales.double()
        for num_rows, num_processors in ((1, 1), (9, 1), (40, 1), (5, 132)):
            y = product_of_few_rows(x[:num_rows], weight, scales, num_processors=num_processors)
            case = dtype, num_outputs, num_inputs, num_rows, num_processors
            if dtype is torch.bfloat16:  # which the interpreter cuts off rather than rounds
                assert ((y - wanted[:num_rows]).abs() <= wanted[:num_rows].abs() / 128).all(), case
            else:
                assert torch.equal(y, wanted[:num_rows].to(dtype)), case
weight = torch.randint(-127, 128, (16, 2100), dtype=torch.int8)
x, bias, residual = (torch.randint(-8, 9, shape).to(torch.float16) for shape in ((3, 2100), (16,), (3, 16)))
scales = torch.full((16,), 2.0**-6, dtype=torch.float16)
product = (x.double() @ weight.double().t()) / 64
for num_processors in (1, 132):
    parts = {"bias_O": bias, "residual_MO": residual, "num_processors": num_processors}
    y = product_of_few_rows(x, weight, scales, **parts)
    assert torch.equal(y, (product + bias.double() + residual.double()).half()), "bias and residual"
weight, x = torch.randint(-127, 128, (40, 700), dtype=torch.int8), torch.randn(3, 700)
wanted = x.double() @ weight.double().t()
y = product_of_few_rows(x, weight, torch.ones(40), num_processors=1)
assert (y - wanted).abs().max() < 1e-6 * wanted.abs().max(), "fp32 inputs lost digits"
"""


def test_products_are_exact_in_triton_s_interpreter() -> None:
    """Borders of all kinds, tiles of all sizes, splits. Sums are exact, so that the order of the sums does not show."""
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "dtype"), [("FP16", torch.float16), ("BF16", torch.bfloat16)])
def test_the_conversion_by_bits_is_exact_for_every_byte_in_every_place(name: str, dtype: torch.dtype) -> None:
    from llama_ssp.models.quantization import int8_kernel

    every_byte = torch.arange(-128, 128, dtype=torch.int8)
    fours = torch.stack([every_byte.roll(place) for place in range(4)], dim=1).contiguous()
    program = getattr(int8_kernel, f"_BYTES_TO_{name}").value
    registers = run_ptx(program, {"$2": fours.view(torch.int32)[:, 0].contiguous()})
    found = torch.stack([registers["$0"], registers["$1"]], dim=1).view(dtype)
    assert torch.equal(found.float(), fours.float())

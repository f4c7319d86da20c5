"""The kernel for int8 and int4 without a GPU: its values in Triton's interpreter, and what ptxas makes of it."""

import os
import subprocess
import sys
from functools import cache

import pytest
import torch
from llama_ssp.models.quantization.few_rows_tiles import STEP, Tiles, tiles_of

from tests.helpers.ahead_of_time import CAPABILITIES, Compiled, compile_kernel
from tests.helpers.lanes import grid
from tests.helpers.ptx import run_ptx

pytestmark = pytest.mark.triton

MOST_INSTRUCTIONS = {(8, 2): 6, (8, 4): 6, (4, 2): 4, (4, 4): 5}
"""Of a thread, for each weight of so many bits and inputs of so many bytes.

While a byte arrives, an H200 has time for 6, an H100 for 8 and an A100 for 9; a byte is two weights in int4.
"""
MOST_SHARED = 99 * 1024
"""Bytes of a block on GPUs since 2020."""
TYPES = {
    "x": "*{}", "residual": "*{}", "y": "*{}",
    "num_rows": "i32", "num_outputs": "i32", "num_inputs": "i32", "split_inputs": "i32",
}  # fmt: skip
WEIGHT_TYPES = {8: {"weight": "*i8", "scales": "*{}"}, 4: {"weight": "*u8", "scales": "*i32"}}
VALUE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def tiles(bits: int, dtype: str, num_rows: int, *, num_outputs: int) -> Tiles:
    return tiles_of(
        num_rows=num_rows, num_outputs=num_outputs, num_inputs=4096, num_processors=132, value_bytes=VALUE_BYTES[dtype],
        byte_weights=8 // bits,
    )  # fmt: skip


@cache
def compiled(bits: int, capability: int, dtype: str, num_rows: int, *, num_outputs: int = 8192) -> Compiled:
    """The kernel as it is called for a matrix with 4096 inputs on an H200."""
    from llama_ssp.models.quantization import few_rows_kernel

    cut = tiles(bits, dtype, num_rows, num_outputs=num_outputs)
    constants = {
        "ROWS": cut.rows, "OUTPUTS": cut.outputs, "INPUTS": cut.warp_inputs, "WARPS": cut.num_warps,
        "IS_SPLIT": cut.num_splits > 1, "PTX": True, "bias": None,
    }  # fmt: skip
    types = {name: kind.format(dtype) for name, kind in (TYPES | WEIGHT_TYPES[bits]).items()}
    if cut.num_splits > 1:
        types["y"] = "*fp32"
    return compile_kernel(
        few_rows_kernel._product, types, constants, capability=capability, num_warps=cut.num_warps,
        num_stages=cut.num_stages, uneven=["num_rows"],
    )  # fmt: skip


def num_weights(found: Compiled, bits: int, dtype: str, *, num_outputs: int) -> int:
    """Weights of a warp in a step, if no other warp has them too."""
    return tiles(bits, dtype, 1, num_outputs=num_outputs).outputs * STEP // found.num_warps


every_variant = grid(bits=[8, 4], capability=CAPABILITIES, dtype=list(VALUE_BYTES), num_rows=[5, 16, 20])


@every_variant
def test_no_register_is_spilled_and_a_block_fits(bits: int, capability: int, dtype: str, num_rows: int) -> None:
    found = compiled(bits, capability, dtype, num_rows)
    assert found.stack_bytes == 0
    assert found.shared_bytes <= MOST_SHARED


@every_variant
def test_every_weight_is_multiplied_once_and_never_converted_as_an_integer(
    bits: int, capability: int, dtype: str, num_rows: int
) -> None:
    """A warp that did what another one does would double its products."""
    found = compiled(bits, capability, dtype, num_rows)
    assert not found.count(r"\bI2F")
    num_tiles = num_weights(found, bits, dtype, num_outputs=8192) // (16 * 16)
    tiles_of_rows = {5: 1, 16: 2, 20: 4 if dtype != "fp32" else 2}[num_rows]
    assert found.count(r"\bHMMA\.16816\.F32") == num_tiles * tiles_of_rows * (3 if dtype == "fp32" else 1)


@grid(bits=[8, 4], capability=CAPABILITIES, dtype=list(VALUE_BYTES), num_outputs=[8192, 2048, 512])
def test_a_weight_takes_few_instructions(bits: int, capability: int, dtype: str, num_outputs: int) -> None:
    found = compiled(bits, capability, dtype, 5, num_outputs=num_outputs)
    most = MOST_INSTRUCTIONS[bits, VALUE_BYTES[dtype]]
    assert 32 * len(found.body) <= most * num_weights(found, bits, dtype, num_outputs=num_outputs)


@grid(capability=CAPABILITIES, dtype=["fp16", "bf16"])
def test_large_matrices_in_int4_leave_an_h200_waiting_for_memory(capability: int, dtype: str) -> None:
    """Up to 8 rows."""
    found = compiled(4, capability, dtype, 5)
    assert 32 * len(found.body) <= 3 * num_weights(found, 4, dtype, num_outputs=8192)


INTERPRETED = """
import numpy, torch, triton.language as tl
from triton.runtime import interpreter
from llama_ssp.kernels.linear_gpu import product_of_few_rows, unpack_codes
from llama_ssp.weights import int4_rows

create_dot = interpreter.InterpreterBuilder.create_dot

def widened(handle):  # the interpreter keeps bf16 as its bits
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

def dot(self, a, b, *others):
    return create_dot(self, widened(a), widened(b), *others)

interpreter.InterpreterBuilder.create_dot = dot


def bytes_and_numbers(num_outputs, num_inputs, dtype):
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales = (2.0 ** -torch.randint(3, 9, (num_outputs,))).to(dtype)
    return (weight, scales), weight.double() * scales.double()[:, None]


def halves_and_numbers(num_outputs, num_inputs, dtype):
    codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    scales, zeros = 2.0 ** -torch.randint(0, 6, (num_outputs, num_inputs // 128)), codes[:, ::128] + 1
    weight, words = int4_rows.split(int4_rows.pack(codes, scales, zeros))
    numbers = (codes.double().unflatten(1, (-1, 128)) - zeros[..., None]) * scales[..., None]
    return (weight, words.t().contiguous()), numbers.flatten(1)


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for make, num_outputs, num_inputs in (
        (bytes_and_numbers, 33, 80), (bytes_and_numbers, 20, 2100),
        (halves_and_numbers, 33, 128), (halves_and_numbers, 20, 2176),
    ):
        operands, numbers = make(num_outputs, num_inputs, dtype)
        x = (torch.randint(-8, 9, (40, num_inputs)) / 8).to(dtype)
        wanted = x.double() @ numbers.t()
        for num_rows, num_processors in ((1, 1), (9, 1), (40, 1), (5, 132)):
            y = product_of_few_rows(x[:num_rows], *operands, num_processors=num_processors)
            case = dtype, num_outputs, num_inputs, num_rows, num_processors
            if dtype is torch.bfloat16:  # which the interpreter cuts off rather than rounds
                assert ((y - wanted[:num_rows]).abs() <= wanted[:num_rows].abs() / 128).all(), case
            else:
                assert torch.equal(y, wanted[:num_rows].to(dtype)), case
for make in (bytes_and_numbers, halves_and_numbers):
    operands, numbers = make(16, 2176, torch.float16)
    x, bias, residual = (torch.randint(-8, 9, shape).to(torch.float16) for shape in ((3, 2176), (16,), (3, 16)))
    wanted = (x.double() @ numbers.t() + bias.double() + residual.double()).half()
    for num_processors in (1, 132):
        parts = {"bias_O": bias, "residual_MO": residual, "num_processors": num_processors}
        assert torch.equal(product_of_few_rows(x, *operands, **parts), wanted), "bias and residual"
for dtype, num_outputs, num_inputs in ((torch.float16, 5, 128), (torch.float32, 9, 17 * 128)):
    (codes, words), numbers = halves_and_numbers(num_outputs, num_inputs, torch.float16)
    some, found = slice(2, num_outputs), torch.empty(num_outputs - 2, num_inputs, dtype=dtype)
    unpack_codes(codes[some], words[:, some], found)
    assert torch.equal(found, numbers[some].to(dtype)), "unpacked"
for make in (bytes_and_numbers, halves_and_numbers):
    (operands, numbers), x = make(40, 768, torch.float32), torch.randn(3, 768)
    wanted = x.double() @ numbers.t()
    y = product_of_few_rows(x, *operands, num_processors=1)
    assert (y - wanted).abs().max() < 1e-6 * wanted.abs().max(), "fp32 inputs lost digits"
"""


def test_products_are_exact_in_triton_s_interpreter() -> None:
    """Borders of all kinds, tiles of all sizes, splits. Sums are exact, so that the order of the sums does not show."""
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "dtype"), [("FP16", torch.float16), ("BF16", torch.bfloat16)])
def test_the_conversion_by_bits_is_exact_for_every_byte_in_every_place(name: str, dtype: torch.dtype) -> None:
    from llama_ssp.models.quantization import few_rows_kernel

    every_byte = torch.arange(-128, 128, dtype=torch.int8)
    fours = torch.stack([every_byte.roll(place) for place in range(4)], dim=1).contiguous()
    program = getattr(few_rows_kernel, f"_BYTES_TO_{name}").value
    registers = run_ptx(program, {"$2": fours.view(torch.int32)[:, 0].contiguous()})
    found = torch.stack([registers["$0"], registers["$1"]], dim=1).view(dtype)
    assert torch.equal(found.float(), fours.float())


@pytest.mark.parametrize(("name", "dtype", "first"), [("FP16", torch.float16, 1024), ("BF16", torch.bfloat16, 128)])
def test_the_conversion_of_halves_is_exact_for_every_byte_in_every_place(
    name: str, dtype: torch.dtype, first: int
) -> None:
    from llama_ssp.models.quantization import few_rows_kernel

    every_byte = torch.arange(256).to(torch.uint8)
    fours = torch.stack([every_byte.roll(place) for place in range(4)], dim=1).contiguous()
    program = getattr(few_rows_kernel, f"_HALVES_TO_{name}").value
    for zero in (0, 8, 16):
        zeros = torch.full((256, 2), first + zero, dtype=dtype).view(torch.int32)[:, 0].contiguous()
        operands = {"$4": fours.view(torch.int32)[:, 0].contiguous(), "$5": zeros, "$6": zeros}
        registers = run_ptx(program, operands)
        low, high = (torch.stack([registers[f"${n}"], registers[f"${n + 1}"]], dim=1).view(dtype) for n in (0, 2))
        assert torch.equal(low.float(), (fours & 15).float() - zero)
        assert torch.equal(high.float(), (fours >> 4).float() - zero)

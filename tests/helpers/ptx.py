"""Computes the few PTX instructions that convert weights, since Triton's interpreter computes no inline assembly.

A register is an int32 tensor with a value for each thread, shape (N,).
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def run_ptx(program: str, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a program of COMPUTED's instructions, and return all registers.

    Args:
        program: one instruction a line; declarations are left out.
        operands: values of the registers that the program reads.
    """
    registers = dict(operands)
    like = next(iter(operands.values()))

    def value(name: str) -> Tensor:
        is_number = name[0].isdigit()
        return torch.full_like(like, _signed(int(name, 0))) if is_number else registers[name]

    for name, line in re.findall(r"^([a-z]\S+) (.*);$", program, re.MULTILINE):
        to, *others = line.split(", ")
        registers[to] = COMPUTED[name](*map(value, others))
    return registers


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number


def _permuted(first: Tensor, second: Tensor, selector: Tensor) -> Tensor:
    """Choose four of eight bytes; all threads have one selector, which repeats no signs."""
    chosen = [int(selector[0]) >> 4 * place & 15 for place in range(4)]
    return torch.stack([first, second], dim=1).view(torch.uint8)[:, chosen].contiguous().view(torch.int32)[:, 0]


def _pairs(operation: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """An operation on both halves of registers."""

    def computed(*operands: Tensor) -> Tensor:
        halves = [operand[:, None].view(dtype).float() for operand in operands]
        return operation(*halves).to(dtype).view(torch.int32)[:, 0]

    return computed


COMPUTED: dict[str, Callable[..., Tensor]] = {
    "mov.b32": torch.clone,
    "xor.b32": torch.bitwise_xor,
    "and.b32": torch.bitwise_and,
    "shr.u32": lambda word, places: (word.long() % 2**32 >> places.long()).to(torch.int32),
    "prmt.b32": _permuted,
    "sub.f16x2": _pairs(torch.sub, torch.float16),
    "fma.rn.f16x2": _pairs(lambda first, second, third: first * second + third, torch.float16),
    "fma.rn.bf16x2": _pairs(lambda first, second, third: first * second + third, torch.bfloat16),
}

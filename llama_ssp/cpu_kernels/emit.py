"""Writes LLVM's intermediate code for CPU kernels: loops, vectors and calls into torch.

A vector has 16 lanes whatever the CPU: LLVM cuts it where registers are shorter. No flag allows LLVM to reorder sums,
so a kernel computes the same bits on every CPU with the same instructions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
POINTER = ir.PointerType()
VOID = ir.VoidType()
F32S, I32S = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

Value = Any
"""A value of the code; llvmlite comes without types."""


def i64(number: int) -> Value:
    """A constant."""
    return ir.Constant(I64, number)


def f32(number: float) -> Value:
    """A constant."""
    return ir.Constant(F32, number)


def floats(number: float) -> Value:
    """A vector of equal constants."""
    return ir.Constant(F32S, [f32(number)] * LANES)


class Code(ir.IRBuilder):  # type: ignore[misc]  # llvmlite comes without types
    """The body of one function."""

    def __init__(self, function: Value) -> None:
        super().__init__(function.append_basic_block())
        self._entry = self.block

    def slot(self, kind: Value, count: int = 1) -> Value:
        """Memory on the stack, taken once however often the code around it runs."""
        with self.goto_block(self._entry):
            if self._entry.instructions:
                self.position_before(self._entry.instructions[0])
            place = self.alloca(kind, i64(count))
            place.type = POINTER  # llvmlite would know what it points to
            return place

    def at(self, pointer: Value, index: Value, kind: Value = I8) -> Value:
        """The address of an element."""
        return self.gep(pointer, [index], source_etype=kind)

    def read(self, pointer: Value, kind: Value, index: Value | None = None) -> Value:
        """Load a number or a vector from any address; `index` counts numbers."""
        number = kind.element if isinstance(kind, ir.VectorType) else kind
        place = pointer if index is None else self.at(pointer, index, number)
        loaded = self.load(place, typ=kind)
        loaded.align = max(number.width // 8 if isinstance(number, ir.IntType) else 4, 1)
        if isinstance(number, ir.HalfType):
            loaded.align = 2
        return loaded

    def write(self, value: Value, pointer: Value, index: Value | None = None) -> None:
        """Store a number or a vector at any address."""
        number = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        stored = self.store(value, pointer if index is None else self.at(pointer, index, number))
        stored.align = 1

    def splat(self, number: Value) -> Value:
        """A vector of one number."""
        kind = ir.VectorType(number.type, LANES)
        one = self.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(I32, 0))
        return self.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(I32S, [0] * LANES))

    def intrinsic(self, name: str, result: Value, *arguments: Value) -> Value:
        """Call a function of LLVM or of torch."""
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(result, [value.type for value in arguments]), name)
        return self.call(found, arguments)

    def fused(self, left: Value, right: Value, added: Value) -> Value:
        """Multiply and add with one rounding."""
        name = "llvm.fma.v16f32" if isinstance(left.type, ir.VectorType) else "llvm.fma.f32"
        return self.intrinsic(name, left.type, left, right, added)

    def halves(self, vector: Value, join: Any) -> Value:  # noqa: ANN401 - a method of the builder
        """Join the lanes of a vector to one number, halves first."""
        width = LANES
        while width > 1:
            width //= 2
            kind = vector.type
            parts = [
                self.shuffle_vector(
                    vector, ir.Constant(kind, ir.Undefined),
                    ir.Constant(ir.VectorType(I32, width), list(range(first, first + width))),
                )
                for first in (0, width)
            ]  # fmt: skip
            vector = join(*parts)
        return self.extract_element(vector, ir.Constant(I32, 0))

    def largest(self, vector: Value) -> Value:
        """The largest lane; NaN if one of them is."""

        def larger(one: Value, other: Value) -> Value:
            lanes = f"v{one.type.count}f32" if isinstance(one.type, ir.VectorType) else "f32"
            return self.intrinsic(f"llvm.maximum.{lanes}", one.type, one, other)

        return self.halves(vector, larger)

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int, carried: list[Value] | None = None) -> Iterator[list[Value]]:
        """Repeat the body while index < stop.

        Yields [index, *values]; the body replaces the values in place, and they hold the last ones after the loop.
        """
        carried = carried or []
        before = self.block
        head, body, after = (self.append_basic_block(name) for name in ("head", "body", "after"))
        self.branch(head)
        self.position_at_end(head)
        phis = [self.phi(value.type) for value in (start, *carried)]
        for phi, value in zip(phis, (start, *carried), strict=True):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", phis[0], stop), body, after)
        self.position_at_end(body)
        values = list(phis)
        yield values
        values[0] = self.add(phis[0], i64(step))
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(after)
        values[:] = phis

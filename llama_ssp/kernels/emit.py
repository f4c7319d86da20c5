"""Writes LLVM's intermediate code for CPU kernels: loops, vectors and calls into torch.

A vector has 16 lanes whatever the CPU: LLVM cuts it where registers are shorter. No flag allows LLVM to reorder sums,
so a kernel computes the same bits on every CPU with the same instructions.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
POINTER = ir.PointerType()
VOID = ir.VoidType()
F32S, I32S = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

NO_POINTER = ir.Constant(POINTER, None)
FLOAT32, INT64 = ir.Constant(I32, 6), ir.Constant(I32, 4)
"""Number formats of tensors, as torch counts them."""
_LEAST_LOG, _MOST_LOG = -87.0, 88.0

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


def function(module: ir.Module, name: str, kinds: Sequence[Value]) -> tuple[Code, Sequence[Value]]:
    """Begin a function; returns its code and its arguments."""
    function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    return Code(function), function.args


def larger(code: Code, one: Value, other: Value) -> Value:
    """The larger one of two whole numbers."""
    return code.select(code.icmp_signed(">", one, other), one, other)


def smaller(code: Code, one: Value, other: Value) -> Value:
    """The smaller one of two whole numbers."""
    return code.select(code.icmp_signed("<", one, other), one, other)


def lane_numbers(numbers: Iterable[int]) -> Value:
    """A vector of constants, a whole number a lane."""
    return ir.Constant(ir.VectorType(I32, LANES), list(numbers))


def exponential(code: Code, x: Value) -> Value:
    """e^x to the last bit or two; the ends of its range stand for what is beyond.

    Source: the polynomial of expf in Cephes.
    """
    x = code.intrinsic("llvm.maxnum.v16f32", F32S, x, floats(_LEAST_LOG))
    x = code.intrinsic("llvm.minnum.v16f32", F32S, x, floats(_MOST_LOG))
    whole = code.intrinsic("llvm.nearbyint.v16f32", F32S, code.fmul(x, floats(1.44269504)))
    rest = code.fused(whole, floats(-0.693359375), x)
    rest = code.fused(whole, floats(2.12194440e-4), rest)
    value = floats(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = code.fused(value, rest, floats(factor))
    value = code.fadd(code.fused(value, code.fmul(rest, rest), rest), floats(1.0))
    exponent = code.add(code.fptosi(whole, I32S), ir.Constant(I32S, [127] * LANES))
    return code.fmul(value, code.bitcast(code.shl(exponent, ir.Constant(I32S, [23] * LANES)), F32S))


def stored(code: Code, names: Sequence[str], given: dict[str, Value]) -> Value:
    """Write numbers and addresses into words on the stack."""
    words = code.slot(I64, len(names))
    for place, name in enumerate(names):
        code.store(given[name], code.at(words, i64(place), I64))
    return words


def loaded(code: Code, names: Sequence[str], words: Value, numbers: Collection[str]) -> dict[str, Value]:
    """Read words that `stored` wrote: numbers, and addresses."""
    places = {name: code.at(words, i64(place), I64) for place, name in enumerate(names)}
    return {name: code.load(place, typ=I64 if name in numbers else POINTER) for name, place in places.items()}


class Torch:
    """Calls of torch's stable C interface from the code of an operator."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._answer = code.slot(I64, 1)

    def _ask(self, name: str, *arguments: Value) -> Value:
        self.code.intrinsic(name, I32, *arguments, self._answer)
        return self._answer

    def pointer(self, tensor: Value) -> Value:
        """The address of a tensor's numbers."""
        return self.code.load(self._ask("aoti_torch_get_data_ptr", tensor), typ=POINTER)

    def pointer_or_none(self, tensor: Value) -> Value:
        """The address of a tensor's numbers, or none if it has none."""
        number = self.code.load(self._ask("aoti_torch_get_numel", tensor), typ=I64)
        is_empty = self.code.icmp_unsigned("==", number, i64(0))
        return self.code.select(is_empty, NO_POINTER, self.pointer(tensor))

    def size(self, tensor: Value, dim: int) -> Value:
        """Its size in a dimension."""
        sizes = self.code.load(self._ask("aoti_torch_get_sizes", tensor), typ=POINTER)
        return self.code.read(sizes, I64, i64(dim))

    def empty(self, *sizes: Value, kind: Value = FLOAT32) -> Value:
        """A new tensor of one or two dimensions."""
        code, number = self.code, len(sizes)
        shape, strides = code.slot(I64, number), code.slot(I64, number)
        for dim, size in enumerate(sizes):
            code.write(size, shape, i64(dim))
            code.write(sizes[1] if dim == 0 and number > 1 else i64(1), strides, i64(dim))
        zero = ir.Constant(I32, 0)
        made = self._ask("aoti_torch_empty_strided", i64(number), shape, strides, kind, zero, zero)
        return code.load(made, typ=POINTER)

    def free(self, tensor: Value) -> None:
        """Give up a tensor."""
        self.code.intrinsic("aoti_torch_delete_tensor_object", I32, tensor)

"""Writes LLVM's intermediate code for CPU kernels: loops, vectors and calls into torch.

A vector has 16 lanes whatever the CPU: LLVM cuts it where registers are shorter. No flag allows LLVM to reorder sums,
so a kernel computes the same bits on every CPU with the same instructions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from llama_ssp.architectures import engine

LANES = engine.LANES
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
POINTER = ir.PointerType()
VOID = ir.VoidType()
F32S, I32S = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
HALVES, I8S, I16S = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), I8, I16))

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


def wholes(number: int) -> Value:
    """A vector of equal constants."""
    return ir.Constant(I32S, [number] * LANES)


class Code(ir.IRBuilder):  # type: ignore[misc]  # llvmlite comes without types
    """The body of one function."""

    def __init__(self, function: Value) -> None:
        super().__init__(function.append_basic_block())
        self._entry = self.block

    def end(self) -> Value:
        """End the function; returns it."""
        self.ret_void()
        return self.function

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
        whole = number.width // 8 if isinstance(number, ir.IntType) else 0
        loaded.align = whole or (2 if isinstance(number, ir.HalfType) else 4)
        return loaded

    def write(self, value: Value, pointer: Value, index: Value | None = None) -> None:
        """Store a number or a vector at any address."""
        number = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        stored = self.store(value, pointer if index is None else self.at(pointer, index, number))
        stored.align = 1

    def splat(self, number: Value) -> Value:
        """A vector of one number."""
        nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        return self.shuffled(self.insert_element(nothing, number, ir.Constant(I32, 0)), nothing, [0] * LANES)

    def shuffled(self, one: Value, other: Value, lanes: Sequence[int]) -> Value:
        """Lanes of two vectors; those of the second follow those of the first."""
        return self.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

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
            nothing = ir.Constant(vector.type, ir.Undefined)
            vector = join(*(self.shuffled(vector, nothing, range(first, first + width)) for first in (0, width)))
        return self.extract_element(vector, ir.Constant(I32, 0))

    def maximum(self, one: Value, other: Value) -> Value:
        """The larger one of two floats, or of each lane; NaN if one of them is."""
        lanes = f"v{one.type.count}f32" if isinstance(one.type, ir.VectorType) else "f32"
        return self.intrinsic(f"llvm.maximum.{lanes}", one.type, one, other)

    def larger(self, one: Value, other: Value) -> Value:
        """The larger one of two whole numbers."""
        return self.select(self.icmp_signed(">", one, other), one, other)

    def smaller(self, one: Value, other: Value) -> Value:
        """The smaller one of two whole numbers."""
        return self.select(self.icmp_signed("<", one, other), one, other)

    def stored(self, names: Mapping[str, Value], given: Mapping[str, Value]) -> Value:
        """Write numbers and addresses, whose kinds are given by name, into words on the stack."""
        words = self.slot(I64, len(names))
        for place, name in enumerate(names):
            self.store(given[name], self.at(words, i64(place), I64))
        return words

    def loaded(self, names: Mapping[str, Value], words: Value) -> dict[str, Value]:
        """Read words that `stored` wrote."""
        return {
            name: self.load(self.at(words, i64(place), I64), typ=kind)
            for place, (name, kind) in enumerate(names.items())
        }

    def widened(self, dtype: str | None, place: Value, index: Value | None = None) -> Value:
        """16 numbers of a format of torch as fp32, which None stands for; those of E4M3 by `from_e4m3`."""
        if dtype is None:
            return self.read(place, F32S, index)
        if dtype == "float16":
            return self.fpext(self.read(place, HALVES, index), F32S)
        if dtype == "bfloat16":
            return self.bitcast(self.shl(self.zext(self.read(place, I16S, index), I32S), wholes(16)), F32S)
        codes = self.read(place, I8S, index)
        return self.sitofp(self.sext(codes, I32S), F32S) if dtype == "int8" else self.from_e4m3(codes)

    def scales_of(self, x: Value, count: Value, limit: float) -> tuple[Value, Value]:
        """The scale with which the largest size of numbers stands as `limit`, and its inverse as a vector; 0 for 0."""
        with self.loop(i64(0), count, LANES, [floats(0.0)]) as values:
            size = self.intrinsic("llvm.fabs.v16f32", F32S, self.read(x, F32S, values[0]))
            values[1] = self.maximum(values[1], size)
        largest = self.halves(values[1], self.maximum)
        is_zero = self.fcmp_ordered("==", largest, f32(0.0))
        factor = self.select(is_zero, f32(0.0), self.fdiv(f32(limit), largest))
        return self.fdiv(largest, f32(limit)), self.splat(factor)

    def from_e4m3(self, codes: Value) -> Value:
        """A vector of codes of E4M3 as numbers, divided by `kinds.E4M3_SHRINK`; NaN codes become finite.

        The bits of a code, moved, are those of an fp16 number.
        """
        bits = self.shl(self.sext(codes, I16S), ir.Constant(I16S, [7] * LANES))
        bits = self.and_(bits, ir.Constant(I16S, [~(1 << 14)] * LANES))
        return self.fpext(self.bitcast(bits, HALVES), F32S)

    def without_bits(self, bits: Value, number: int) -> Value:
        """Take the lowest bits off a vector of whole numbers, rounded to the nearest, ties to even."""
        odd = self.and_(self.lshr(bits, wholes(number)), wholes(1))
        return self.lshr(self.add(bits, self.add(odd, wholes(2 ** (number - 1) - 1))), wholes(number))

    def exponential(self, x: Value) -> Value:
        """e^x of a vector to the last bit or two; the ends of its range stand for what is beyond.

        Source: the polynomial of expf in Cephes.
        """
        x = self.intrinsic("llvm.maxnum.v16f32", F32S, x, floats(_LEAST_LOG))
        x = self.intrinsic("llvm.minnum.v16f32", F32S, x, floats(_MOST_LOG))
        whole = self.intrinsic("llvm.nearbyint.v16f32", F32S, self.fmul(x, floats(1.44269504)))
        rest = self.fused(whole, floats(-0.693359375), x)
        rest = self.fused(whole, floats(2.12194440e-4), rest)
        value = floats(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = self.fused(value, rest, floats(factor))
        value = self.fadd(self.fused(value, self.fmul(rest, rest), rest), floats(1.0))
        exponent = self.add(self.fptosi(whole, I32S), wholes(127))
        return self.fmul(value, self.bitcast(self.shl(exponent, wholes(23)), F32S))

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


class Operator:
    """A function that torch calls as an operator, by its stable C interface.

    Arguments come as words on a stack, `tensors` first, and are the operator's to free.
    """

    def __init__(self, module: ir.Module, name: str, num_tensors: int) -> None:
        self.code, (self._stack, _, _) = function(module, name, [POINTER, I64, I64])
        self.code.function.linkage = "external"
        self._answer = self.code.slot(I64)
        self.tensors = [self.argument(place, POINTER) for place in range(num_tensors)]
        self._owned = [*self.tensors]
        self._lists: list[TensorList] = []

    def argument(self, place: int, kind: Value = I64) -> Value:
        """A tensor, or a number behind the tensors."""
        return self.code.load(self.code.at(self._stack, i64(place), I64), typ=kind)

    def list_of(self, place: int) -> "TensorList":
        """A list of tensors behind the tensors."""
        self._lists.append(TensorList(self, self.argument(place, POINTER)))
        return self._lists[-1]

    def ask(self, name: str, *arguments: Value, kind: Value = POINTER) -> Value:
        """What a function of torch's interface answers."""
        self.code.intrinsic(name, I32, *arguments, self._answer)
        return self.code.load(self._answer, typ=kind)

    def pointer(self, tensor: Value) -> Value:
        """The address of a tensor's numbers."""
        return self.ask("aoti_torch_get_data_ptr", tensor)

    def pointer_or_none(self, tensor: Value) -> Value:
        """The address of a tensor's numbers, or none if it has none."""
        is_empty = self.code.icmp_unsigned("==", self.ask("aoti_torch_get_numel", tensor, kind=I64), i64(0))
        return self.code.select(is_empty, NO_POINTER, self.pointer(tensor))

    def size(self, tensor: Value, dim: int) -> Value:
        """Its size in a dimension."""
        return self.code.read(self.ask("aoti_torch_get_sizes", tensor), I64, i64(dim))

    def empty(self, *sizes: Value, kind: Value = FLOAT32) -> Value:
        """A new tensor of one or two dimensions, freed at the end unless it is the result."""
        code, number = self.code, len(sizes)
        shape, strides = code.slot(I64, number), code.slot(I64, number)
        for dim, size in enumerate(sizes):
            code.write(size, shape, i64(dim))
            code.write(sizes[1] if dim == 0 and number > 1 else i64(1), strides, i64(dim))
        zero = ir.Constant(I32, 0)
        self._owned.append(self.ask("aoti_torch_empty_strided", i64(number), shape, strides, kind, zero, zero))
        return self._owned[-1]

    def share(self, count: Value, grain: Value, part: Value, words: Value) -> None:
        """Let torch's threads run a function (begin, end, words) for parts of `count` units, at least `grain` each."""
        self.code.intrinsic("torch_parallel_for", I32, i64(0), count, grain, part, words)

    def give(self, result: Value) -> None:
        """Leave a result, free all other tensors, and end the function."""
        for tensor in self._owned:
            if tensor is not result:
                self.free(tensor)
        for tensors in self._lists:
            tensors.free()
        self.code.store(result, self._stack)
        self.code.ret_void()

    def free(self, tensor: Value) -> None:
        """Free a tensor that is the operator's."""
        self.code.intrinsic("aoti_torch_delete_tensor_object", I32, tensor)


class TensorList:
    """A list of tensors that an operator gets, and frees at its end."""

    def __init__(self, operator: Operator, handle: Value) -> None:
        self._operator, self._handle = operator, handle

    def size(self) -> Value:
        """The number of its tensors."""
        return self._operator.ask("torch_list_size", self._handle, kind=I64)

    def item(self, place: Value) -> Value:
        """A tensor, which stays the list's."""
        return self._operator.ask("torch_list_get_item", self._handle, place)

    def free(self) -> None:
        """Free the tensors and the list."""
        code = self._operator.code
        with code.loop(i64(0), self.size(), 1) as (place,):
            self._operator.free(self.item(place))
        code.intrinsic("torch_delete_list", I32, self._handle)

"""Writes LLVM's intermediate code for CPU kernels: loops, vectors and calls into torch.

A vector has 16 lanes whatever the CPU: LLVM cuts it where registers are shorter. No flag allows LLVM to reorder sums,
so a kernel computes the same bits on every CPU with the same instructions.

A Python number becomes a constant of the kind of the operands beside it; counts and indices are `I64`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from llama_ssp.architectures.engine import LANES

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
POINTER = ir.PointerType()
VOID = ir.VoidType()
F32S, I32S = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
F16S, I8S, I16S = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), I8, I16))

NO_POINTER = ir.Constant(POINTER, None)
FLOAT32, INT64 = ir.Constant(I32, 6), ir.Constant(I32, 4)
"""Number formats of tensors, as torch counts them."""

Value = Any
"""A value of the code; llvmlite comes without types."""


def constant(kind: Value, number: float) -> Value:
    """A constant; a vector has the number in all lanes."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _alike(values: Sequence[Value]) -> list[Value]:
    """Return the values with numbers replaced by constants of the kind of the other values."""
    (kind, *_) = [value.type for value in values if not isinstance(value, (int, float))]
    return [constant(kind, value) if isinstance(value, (int, float)) else value for value in values]


def _counted(value: Value) -> Value:
    return constant(I64, value) if isinstance(value, int) else value


class Code(ir.IRBuilder):  # type: ignore[misc]  # llvmlite comes without types
    """The body of one function."""

    def __init__(self, function: Value) -> None:
        super().__init__(function.append_basic_block())
        self._entry = self.block

    @classmethod
    def begin(cls, module: ir.Module, name: str, kinds: Sequence[Value]) -> tuple["Code", Sequence[Value]]:
        """Begin a function; returns its body and its arguments."""
        function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
        function.linkage = "internal"
        return cls(function), function.args

    def end(self) -> Value:
        """End the function; returns it."""
        self.ret_void()
        return self.function

    def slot(self, kind: Value, count: int = 1) -> Value:
        """Memory on the stack, taken once however often the code around it runs."""
        with self.goto_block(self._entry):
            if self._entry.instructions:
                self.position_before(self._entry.instructions[0])
            place = self.alloca(kind, constant(I64, count))
            place.type = POINTER  # llvmlite would know what it points to
            return place

    def at(self, pointer: Value, index: Value, kind: Value = I8) -> Value:
        """The address of an element."""
        return self.gep(pointer, [_counted(index)], source_etype=kind)

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
        value = _counted(value)
        number = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        stored = self.store(value, pointer if index is None else self.at(pointer, index, number))
        stored.align = 1

    def prefetch(self, place: Value) -> None:
        """Prefetch the memory at an address into the cache of this core; an address without memory does no harm."""
        is_read, level, is_data = (ir.Constant(I32, number) for number in (0, 2, 1))
        self.intrinsic("llvm.prefetch.p0", VOID, place, is_read, level, is_data)

    def splat(self, number: Value) -> Value:
        """A vector of one number."""
        nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        return self.shuffled(self.insert_element(nothing, number, ir.Constant(I32, 0)), nothing, [0] * LANES)

    def shuffled(self, one: Value, other: Value, lanes: Sequence[int]) -> Value:
        """Return lanes of two vectors; the numbers of the second's lanes follow the first's."""
        return self.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def intrinsic(self, name: str, result: Value, *arguments: Value) -> Value:
        """Call a function of LLVM or of torch."""
        arguments = tuple(map(_counted, arguments))
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(result, [value.type for value in arguments]), name)
        return self.call(found, arguments)

    def call(self, function: Value, arguments: Sequence[Value]) -> Value:
        """Call a function of the module."""
        return super().call(function, [*map(_counted, arguments)])

    def fused(self, left: Value, right: Value, added: Value) -> Value:
        """Multiply and add with one rounding."""
        left, right, added = _alike((left, right, added))
        name = "llvm.fma.v16f32" if isinstance(left.type, ir.VectorType) else "llvm.fma.f32"
        return self.intrinsic(name, left.type, left, right, added)

    def halves(self, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
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
        one, other = _alike((one, other))
        return self.select(self.icmp_signed(">", one, other), one, other)

    def smaller(self, one: Value, other: Value) -> Value:
        """The smaller one of two whole numbers."""
        one, other = _alike((one, other))
        return self.select(self.icmp_signed("<", one, other), one, other)

    def is_there(self, pointer: Value) -> Value:
        """Whether a pointer is not `NO_POINTER`."""
        return self.icmp_unsigned("!=", self.ptrtoint(pointer, I64), 0)

    def stored(self, names: Mapping[str, Value], given: Mapping[str, Value]) -> Value:
        """Write numbers and addresses, whose kinds are given by name, into words on the stack."""
        words = self.slot(I64, len(names))
        for place, name in enumerate(names):
            self.store(_counted(given[name]), self.at(words, place, I64))
        return words

    def loaded(self, names: Mapping[str, Value], words: Value) -> dict[str, Value]:
        """Read words that `stored` wrote."""
        return {
            name: self.load(self.at(words, place, I64), typ=kind) for place, (name, kind) in enumerate(names.items())
        }

    def widened(self, dtype: str | None, place: Value, index: Value | None = None) -> Value:
        """Return 16 numbers of a torch format (None: fp32) as fp32; those of E4M3 by `from_e4m3`."""
        if dtype is None:
            return self.read(place, F32S, index)
        if dtype == "float16":
            return self.fpext(self.read(place, F16S, index), F32S)
        if dtype == "bfloat16":
            return self.bitcast(self.shl(self.zext(self.read(place, I16S, index), I32S), 16), F32S)
        codes = self.read(place, I8S, index)
        return self.sitofp(self.sext(codes, I32S), F32S) if dtype == "int8" else self.from_e4m3(codes)

    def scales_of(self, x: Value, count: Value, limit: float) -> tuple[Value, Value]:
        """Return the scale from `limit` to the largest magnitude of numbers, and its inverse in a vector; 0 for 0."""
        with self.loop(0, count, LANES, [constant(F32S, 0.0)]) as values:
            size = self.intrinsic("llvm.fabs.v16f32", F32S, self.read(x, F32S, values[0]))
            values[1] = self.maximum(values[1], size)
        largest = self.halves(values[1], self.maximum)
        factor = self.select(self.fcmp_ordered("==", largest, 0.0), 0.0, self.fdiv(limit, largest))
        return self.fdiv(largest, limit), self.splat(factor)

    def from_e4m3(self, codes: Value) -> Value:
        """A vector of codes of E4M3 as numbers, divided by `kinds.E4M3_SHRINK`; NaN codes become finite.

        The bits of a code, moved, are an fp16 number's.
        """
        bits = self.and_(self.shl(self.sext(codes, I16S), 7), ~(1 << 14))
        return self.fpext(self.bitcast(bits, F16S), F32S)

    def without_bits(self, bits: Value, number: int) -> Value:
        """Take the lowest bits off a vector of whole numbers, rounded to the nearest, ties to even."""
        odd = self.and_(self.lshr(bits, number), 1)
        return self.lshr(self.add(bits, self.add(odd, 2 ** (number - 1) - 1)), number)

    def exponential(self, x: Value) -> Value:
        """Return e^x of a vector, exact to the last bit or two; numbers beyond the range get the result at its end.

        Source: the polynomial of expf in Cephes.
        """
        x = self.intrinsic("llvm.maxnum.v16f32", F32S, x, constant(F32S, -87.0))
        x = self.intrinsic("llvm.minnum.v16f32", F32S, x, constant(F32S, 88.0))
        whole = self.intrinsic("llvm.nearbyint.v16f32", F32S, self.fmul(x, 1.44269504))
        rest = self.fused(whole, 2.12194440e-4, self.fused(whole, -0.693359375, x))
        value: Value = 1.9875691500e-4
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = self.fused(value, rest, factor)
        value = self.fadd(self.fused(value, self.fmul(rest, rest), rest), 1.0)
        exponent = self.add(self.fptosi(whole, I32S), 127)
        return self.fmul(value, self.bitcast(self.shl(exponent, 23), F32S))

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int, carried: list[Value] | None = None) -> Iterator[list[Value]]:
        """Repeat the body while index < stop.

        Yields [index, *values]; the body replaces the values in place, and they hold the last ones after the loop.
        """
        before, stop = self.block, _counted(stop)
        begun = [*map(_counted, (start, *(carried or ())))]
        head, body, after = (self.append_basic_block(name) for name in ("head", "body", "after"))
        self.branch(head)
        self.position_at_end(head)
        phis = [self.phi(value.type) for value in begun]
        for phi, value in zip(phis, begun, strict=True):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", phis[0], stop), body, after)
        self.position_at_end(body)
        values = list(phis)
        yield values
        values[0] = self.add(phis[0], step)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(after)
        values[:] = phis


def _taking_numbers(name: str, num_others: int) -> Value:
    """An operation of the builder, whose operands may be numbers; other arguments come before them."""
    operation = getattr(ir.IRBuilder, name)

    def operate(code: Code, *given: Value) -> Value:
        return operation(code, *given[:num_others], *_alike(given[num_others:]))

    return operate


for _name in ("add", "sub", "mul", "sdiv", "srem", "and_", "or_", "shl", "lshr", "fadd", "fsub", "fmul", "fdiv"):
    setattr(Code, _name, _taking_numbers(_name, 0))
for _name in ("icmp_signed", "icmp_unsigned", "fcmp_ordered", "fcmp_unordered", "select"):
    setattr(Code, _name, _taking_numbers(_name, 1))


class Operator:
    """A function that torch calls as an operator, by its stable C interface.

    Arguments come as words on a stack, `tensors` first, and are the operator's to free.
    """

    def __init__(self, module: ir.Module, name: str, num_tensors: int) -> None:
        self.code, (self._stack, _, _) = Code.begin(module, name, [POINTER, I64, I64])
        self.code.function.linkage = "external"
        self._answer = self.code.slot(I64)
        self.tensors = [self.argument(place, POINTER) for place in range(num_tensors)]
        self._owned = [*self.tensors]
        self._lists: list[Value] = []

    def argument(self, place: int, kind: Value = I64) -> Value:
        """Return an argument: a tensor, or one of the numbers, which come after the tensors."""
        return self.code.load(self.code.at(self._stack, place, I64), typ=kind)

    def list_of(self, place: int) -> Value:
        """Return an argument that is a list of tensors; such lists come after the tensors."""
        self._lists.append(self.argument(place, POINTER))
        return self._lists[-1]

    def length(self, tensors: Value) -> Value:
        """Number of tensors of a list."""
        return self.ask("torch_list_size", tensors, kind=I64)

    def item(self, tensors: Value, place: Value) -> Value:
        """Return a tensor of a list; the list keeps owning the tensor."""
        return self.ask("torch_list_get_item", tensors, place)

    def ask(self, name: str, *arguments: Value, kind: Value = POINTER) -> Value:
        """The answer of a function of torch's interface."""
        self.code.intrinsic(name, I32, *arguments, self._answer)
        return self.code.load(self._answer, typ=kind)

    def pointer(self, tensor: Value) -> Value:
        """The address of a tensor's numbers."""
        return self.ask("aoti_torch_get_data_ptr", tensor)

    def pointer_or_none(self, tensor: Value) -> Value:
        """The address of a tensor's numbers, or none if it has none."""
        is_empty = self.code.icmp_unsigned("==", self.ask("aoti_torch_get_numel", tensor, kind=I64), 0)
        return self.code.select(is_empty, NO_POINTER, self.pointer(tensor))

    def size(self, tensor: Value, dim: int) -> Value:
        """Return a tensor's size in a dimension."""
        return self.code.read(self.ask("aoti_torch_get_sizes", tensor), I64, dim)

    def empty(self, *sizes: Value, kind: Value = FLOAT32) -> Value:
        """A new tensor of one or two dimensions, freed at the end unless it is the result."""
        code, number = self.code, len(sizes)
        shape, strides = code.slot(I64, number), code.slot(I64, number)
        for dim, size in enumerate(sizes):
            code.write(size, shape, dim)
            code.write(sizes[1] if dim == 0 and number > 1 else 1, strides, dim)
        zero = constant(I32, 0)
        self._owned.append(self.ask("aoti_torch_empty_strided", number, shape, strides, kind, zero, zero))
        return self._owned[-1]

    def share(self, count: Value, grain: Value, part: Value, words: Value) -> None:
        """Let torch's threads run a function (begin, end, words) for parts of `count` units, at least `grain` each."""
        self.code.intrinsic("torch_parallel_for", I32, 0, count, grain, part, words)

    def give(self, result: Value) -> None:
        """Return a result to torch, free all other tensors, and end the function."""
        code = self.code
        for tensor in self._owned:
            if tensor is not result:
                self._free(tensor)
        for tensors in self._lists:
            with code.loop(0, self.length(tensors), 1) as (place,):
                self._free(self.item(tensors, place))
            code.intrinsic("torch_delete_list", I32, tensors)
        code.store(result, self._stack)
        code.ret_void()

    def _free(self, tensor: Value) -> None:
        self.code.intrinsic("aoti_torch_delete_tensor_object", I32, tensor)

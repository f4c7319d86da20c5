"""The operators of `products`, as torch calls them: what is done with rows before the product, and the threads.

The rows of one product are normed and quantized by the thread that calls, since they are few. Memory comes from torch.

Shapes: M rows, I inputs, O outputs.
"""

from llvmlite import ir

from llama_ssp.cpu_kernels.emit import F32, F32S, I8, I32, I32S, I64, LANES, POINTER, Code, Value, f32, floats, i64
from llama_ssp.cpu_kernels.products import CONTEXT, function, part_of

_SERIAL = 2**16
"""Multiplications, weights that are read included, that a thread of its own does not pay for."""
_NONE = ir.Constant(POINTER, None)
FLOAT32, INT64 = ir.Constant(I32, 6), ir.Constant(I32, 4)
"""Number formats of tensors."""


def emit(kind: str) -> ir.Module:
    """The operator of a kind, with everything it calls; its entry is `product`."""
    module = ir.Module(name=f"product of {kind}")
    part = part_of(module, kind)
    part.linkage = "external"  # `layer_operator` calls it too
    _entry(module, kind, part)
    return module


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
        return self.code.select(is_empty, _NONE, self.pointer(tensor))

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


def _entry(module: ir.Module, kind: str, part: Value) -> None:
    """The operator, as torch calls it: (x, weights, scales, bias, residual, norm, least_square, gates) -> y."""
    code, (stack, _, _) = function(module, "product", [POINTER, I64, I64])
    code.function.linkage = "external"
    torch = Torch(code)
    tensors = [code.load(code.at(stack, i64(place), I64), typ=POINTER) for place in range(6)]
    x, weights, scales, bias, residual, norm = tensors
    least_square = code.fptrunc(code.read(stack, ir.DoubleType(), i64(6)), F32)
    gates = code.and_(code.read(stack, I64, i64(7)), i64(1))
    num_rows, num_inputs = torch.size(x, 0), torch.size(x, 1)
    num_outputs = code.mul(torch.size(weights, 0), i64(LANES))
    width = code.sdiv(num_outputs, code.add(gates, i64(1)))
    y = torch.empty(num_rows, width)
    # Room for normed rows, and for quantized ones with their scales and sums.
    scratch = torch.empty(code.mul(num_rows, code.add(code.mul(num_inputs, i64(2)), i64(2))))
    room = torch.pointer(scratch)
    sizes = num_rows, num_inputs
    rows = normed(code, torch.pointer(x), room, (torch.pointer_or_none(norm), least_square), sizes)
    given = {"row_scales": _NONE, "row_sums": _NONE}
    if kind == "dots":
        rows, given["row_scales"], given["row_sums"] = rounded(code, rows, room, sizes)
    given |= {
        "weights": torch.pointer(weights), "rows": rows, "y": torch.pointer(y),
        "scales": torch.pointer(scales), "bias": torch.pointer_or_none(bias),
        "residual": torch.pointer_or_none(residual), "num_rows": num_rows, "num_inputs": num_inputs,
        "num_outputs": num_outputs, "gates": gates,
    }  # fmt: skip
    words = code.slot(I64, len(CONTEXT))
    for place, name in enumerate(CONTEXT):
        code.store(given[name], code.at(words, i64(place), I64))
    num_units = code.sdiv(num_outputs, code.mul(code.add(gates, i64(1)), i64(LANES)))
    cost = code.mul(code.mul(num_inputs, i64(LANES)), code.add(num_rows, i64(1)))
    grain = code.add(code.sdiv(i64(_SERIAL), cost), i64(1))
    code.intrinsic("torch_parallel_for", I32, i64(0), num_units, grain, part, words)
    for tensor in (*tensors, scratch):
        torch.free(tensor)
    code.store(y, stack)
    code.ret_void()


def normed(code: Code, x: Value, room: Value, norm: tuple[Value, Value], sizes: tuple[Value, Value]) -> Value:
    """The rows themselves, or their norms, written into the room, if the norm (weight, least square) has a weight."""
    num_rows, num_inputs = sizes
    has_norm = code.icmp_unsigned("!=", code.ptrtoint(norm[0], I64), i64(0))
    with code.if_then(has_norm), code.loop(i64(0), num_rows, 1) as (row,):
        start = code.mul(row, num_inputs)
        _normalize(code, code.at(x, start, F32), code.at(room, start, F32), norm, num_inputs)
    return code.select(has_norm, room, x)


def rounded(code: Code, rows: Value, room: Value, sizes: tuple[Value, Value]) -> tuple[Value, Value, Value]:
    """Round all rows into the second half of the room; returns them, their scales, and their sums."""
    num_rows, num_inputs = sizes
    number = code.mul(num_rows, num_inputs)
    values = code.at(room, number, F32)
    scales = code.at(values, number)
    sums = code.at(scales, num_rows, F32)
    with code.loop(i64(0), num_rows, 1) as (row,):
        start = code.mul(row, num_inputs)
        scale, total = _round_row(code, code.at(rows, start, F32), code.at(values, start), num_inputs)
        code.write(scale, scales, row)
        code.write(total, sums, row)
    return values, scales, sums


def _normalize(code: Code, x: Value, into: Value, norm: tuple[Value, Value], num_inputs: Value) -> None:
    """Write x * weight / sqrt(sum of the squares of x + least square)."""
    weight, least_square = norm
    with code.loop(i64(0), num_inputs, LANES, [floats(0.0)]) as values:
        part = code.read(x, F32S, values[0])
        values[1] = code.fused(part, part, values[1])
    total = code.fadd(code.halves(values[1], code.fadd), least_square)
    factor = code.splat(code.fdiv(f32(1.0), code.intrinsic("llvm.sqrt.f32", F32, total)))
    with code.loop(i64(0), num_inputs, LANES) as (index,):
        scaled = code.fmul(code.read(x, F32S, index), factor)
        code.write(code.fmul(scaled, code.read(weight, F32S, index)), into, index)


def _round_row(code: Code, x: Value, into: Value, num_inputs: Value) -> tuple[Value, Value]:
    """Round a row to 127 steps on each side of zero; returns its scale and the sum of its steps."""
    with code.loop(i64(0), num_inputs, LANES, [floats(0.0)]) as values:
        size = code.intrinsic("llvm.fabs.v16f32", F32S, code.read(x, F32S, values[0]))
        values[1] = code.intrinsic("llvm.maximum.v16f32", F32S, values[1], size)  # NaN if one of them is
    largest = code.largest(values[1])
    is_zero = code.fcmp_ordered("==", largest, f32(0.0))
    factor = code.splat(code.select(is_zero, f32(0.0), code.fdiv(f32(127.0), largest)))
    with code.loop(i64(0), num_inputs, LANES, [ir.Constant(I32S, [0] * LANES)]) as values:
        steps = code.intrinsic("llvm.nearbyint.v16f32", F32S, code.fmul(code.read(x, F32S, values[0]), factor))
        whole = code.fptosi(steps, I32S)
        code.write(code.trunc(whole, ir.VectorType(I8, LANES)), into, values[0])
        values[1] = code.add(values[1], whole)
    return code.fdiv(largest, f32(127.0)), code.halves(values[1], code.add)

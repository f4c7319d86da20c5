"""The draw of one token per row as torch calls it, in integers, with the same ids as `sampling.processors.draw`.

Weights become whole numbers, whose sums are exact in any order: first the sums of all blocks of tokens, then of the
tokens of the drawn block.

Shapes: B rows, V vocabulary, C blocks.
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from llama_ssp.architectures.engine import LANES
from llama_ssp.extensions.cpu.code.emit import F32, F32S, I64, INT64, Code, Operator, Value, constant

_F64 = ir.DoubleType()
_I64S = ir.VectorType(I64, LANES)


def emit() -> ir.Module:
    """Return the module of the operator `draw`, which draws a token id for each row.

    The operator's inputs are the weights (B, V), two uniforms for each row (B, 2), the factor that turns weights into
    whole numbers (`units` of `processors.draw`), and the number of tokens of a block. The ids are (B, 1).
    """
    module = ir.Module(name="draw")
    operator = Operator(module, "draw", num_tensors=2)
    code = operator.code
    weights, uniforms = operator.tensors
    units, block = code.fptrunc(operator.argument(2, _F64), F32), operator.argument(3)
    num_rows, vocabulary = operator.size(weights, 0), operator.size(weights, 1)
    num_blocks = code.sdiv(code.add(vocabulary, code.sub(block, 1)), block)
    ids = operator.empty(num_rows, 1, kind=INT64)
    sums = operator.pointer(operator.empty(num_blocks, kind=INT64))
    first_weight, first_uniform, first_id = map(operator.pointer, (weights, uniforms, ids))
    with code.loop(0, num_rows, 1) as (row,):
        line = code.at(first_weight, code.mul(row, vocabulary), F32)
        pair = code.at(first_uniform, code.mul(row, 2), _F64)
        of_block, of_token = (code.read(pair, _F64, part) for part in (0, 1))
        with code.loop(0, num_blocks, 1, [0]) as values:
            start = code.mul(values[0], block)
            total = _total(code, line, start, code.smaller(code.add(start, block), vocabulary), units)
            code.write(total, sums, values[0])
            values[1] = code.add(values[1], total)
        chosen = _picked(code, num_blocks, partial(code.read, sums, I64), of_block, values[1])
        start = code.mul(chosen, block)
        end = code.smaller(code.add(start, block), vocabulary)

        def weight_at(place: Value, start: Value = start) -> Value:
            return _whole(code, line, code.add(start, place), units, F32)

        token = _picked(code, code.sub(end, start), weight_at, of_token, code.read(sums, I64, chosen))
        code.write(code.add(start, token), first_id, row)
    operator.give(ids)
    return module


def _whole(code: Code, line: Value, place: Value, units: Value, kind: Value) -> Value:
    """A weight, or a vector of them, as whole numbers."""
    weight = code.read(line, kind, place)
    if kind is F32:
        return code.fptosi(code.fmul(weight, units), I64)
    return code.fptosi(code.fmul(weight, code.splat(units)), _I64S)


def _total(code: Code, line: Value, start: Value, end: Value, units: Value) -> Value:
    """The sum of the weights from one place to another."""
    middle = code.sub(end, code.srem(code.sub(end, start), LANES))
    with code.loop(start, middle, LANES, [constant(_I64S, 0)]) as values:
        values[1] = code.add(values[1], _whole(code, line, values[0], units, F32S))
    with code.loop(middle, end, 1, [code.halves(values[1], code.add)]) as rest:
        rest[1] = code.add(rest[1], _whole(code, line, rest[0], units, F32))
    return rest[1]


def _picked(code: Code, count: Value, weight_at: Callable[[Value], Value], uniform: Value, total: Value) -> Value:
    """The first place where the sum of the weights up to it passes a share of their total, or the last place."""
    point = code.fptosi(code.fmul(uniform, code.sitofp(total, _F64)), I64)
    with code.loop(0, count, 1, [0, 0]) as values:
        place, passed, so_far = values
        values[2] = code.add(so_far, weight_at(place))
        values[1] = code.add(passed, code.zext(code.icmp_signed("<=", values[2], point), I64))
    return code.smaller(values[1], code.sub(count, 1))

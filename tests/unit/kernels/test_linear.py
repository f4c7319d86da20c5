"""Holds every form of a linear layer to products in fp64, rows to the same rows alone, and the choice among forms.

`made` skips forms that this processor has no instructions for, and no others: a wrong kernel fails here.
"""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.kernels import linear
from llama_ssp.kernels.between import RmsNorm
from llama_ssp.kernels.compiled import has_features
from llama_ssp.kernels.linear import (
    HalfLinear,
    Kernel,
    NativeLinear,
    PackedLinear,
    PlainLinear,
    can_halve,
    can_pack,
    half_scale,
    make_linear,
    native_floats,
    native_of,
)
from llama_ssp.models.quantization.precision import Precision, int8_linear
from llama_ssp.models.quantization.weight_only import int8_weight_only_linear
from llama_ssp.weights import int4_rows
from tests.helpers.lanes import grid

KERNELS: list[Kernel] = [PlainLinear, PackedLinear]
# Largest difference of two orders of one sum of 96 products of size 1, in units of the result's size.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@grid(
    num_rows=[1, 2, 8, 9, 40],
    kernel=KERNELS,
    has_bias=[False, True],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_every_form_computes_what_the_library_computes(
    kernel: Kernel, num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    if kernel is PackedLinear and not can_pack(dtype):
        pytest.skip(f"this processor has no packed product for {dtype}")
    weight, bias = numbers(48, 96, dtype=dtype), numbers(48, dtype=dtype) if has_bias else None
    x, residual = numbers(num_rows, 96, dtype=dtype), numbers(num_rows, 48, dtype=dtype)
    form = make_linear(weight, bias, kernel=kernel)
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    wanted_sum = wanted + residual
    for found, reference in ((form(x), wanted), (form.add(x, residual), wanted_sum)):
        assert found.dtype is dtype
        assert found.is_contiguous()
        assert (found - reference).abs().max() < TOLERANCES[dtype] * reference.abs().max()


needs_half = pytest.mark.skipif(not can_halve(), reason="this build has no product with a weight in fp16")


@needs_half
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 0.3, 1.0, 1e4])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_a_weight_of_a_16_bit_checkpoint_is_kept_in_16_bits_and_computes_as_in_fp32(
    num_rows: int, size: float, dtype: torch.dtype
) -> None:
    weight, bias = (numbers(1030, 96) * size).to(dtype).float(), numbers(1030)
    x, residual = numbers(num_rows, 96), numbers(num_rows, 1030)
    form = make_linear(weight, bias)
    assert isinstance(form, HalfLinear)  # 1030 outputs are no whole blocks of the compiled kernel
    wanted = functional.linear(x.double(), weight.double(), bias.double())
    assert (form(x) - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert (form.add(x, residual) - wanted - residual).abs().max() < 1e-6 * wanted.abs().max()


def test_what_fp16_cannot_hold_is_not_kept_in_it() -> None:
    held = numbers(1030, 32).bfloat16().float()
    assert half_scale(held) == 1.0
    assert half_scale(held * 2.0**-20) not in (None, 1.0)
    for value in (1.0 + 2.0**-20, float("inf"), float("nan")):
        changed = held.clone()
        changed[1029, 31] = value
        assert half_scale(changed) is None
    assert half_scale(numbers(64, 64)) is None
    assert half_scale(torch.zeros(4, 4)) is None
    assert not isinstance(make_linear(numbers(64, 64), None), HalfLinear)


def test_without_the_private_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_args: object) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(PackedLinear, "__init__", absent)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
        assert isinstance(make_linear(numbers(40, 24), None), PlainLinear)
    finally:
        can_pack.cache_clear()


def test_a_weight_that_stays_in_memory_is_not_copied() -> None:
    weight = numbers(40, 24)
    form = make_linear(weight, None, keeps_weight=True)
    assert isinstance(form, PlainLinear)
    assert form.weight_OI.data_ptr() == weight.data_ptr()
    assert type(make_linear(weight, None)) is (PackedLinear if can_pack(torch.float32) else PlainLinear)


def test_off_the_cpu_torchs_product_is_taken() -> None:
    assert type(make_linear(torch.empty(16, 16, device="meta"), None)) is PlainLinear


FORMS = ("singles", "halves", "bytes", "dots", "nibbles")
ROWS = (1, 2, 5, 6, 9, 14)


def made(form: str, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
    if not has_features(linear.NEEDS[form]):
        pytest.skip("this processor has no such product")
    quantization = {"bytes": "int8_weight_only", "dots": "int8", "nibbles": "int4_weight_only"}
    kernel = Precision(quantization=quantization[form]).kernel if form in quantization else partial(native_floats, form)
    form_of_weight = native_of(make_linear(weight, bias, kernel=kernel))
    assert form_of_weight
    return form_of_weight


def stands_for(form: str, weight: Tensor) -> Tensor:
    """The weights in fp64, from their definition."""
    if form in {"singles", "halves"}:
        return (weight.half() if form == "halves" else weight).double()
    if form == "nibbles":
        return in_4_bits(weight)
    steps = weight.abs().amax(1, keepdim=True).double() / 127
    return (weight.double() / steps).round() * steps


def in_4_bits(weight: Tensor) -> Tensor:
    """16 steps between the smallest and the largest of 128 weights, or zero; a step has 5 bits less than fp32."""
    groups = weight.unflatten(1, (-1, 128))
    least, most = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    steps = (((most - least) / 15).view(torch.int32) & ~31).view(torch.float32)
    zeros = (-least / steps).round()
    codes = ((groups / steps).round() + zeros).clamp(0, 15)
    weight_OI: Tensor = ((codes - zeros).double() * steps.double()).flatten(1)
    return weight_OI


def rows_in(form: str, x: Tensor) -> Tensor:
    """The inputs that a product takes: int8 rounds each row to 127 steps up to its largest."""
    if form != "dots":
        return x.double()
    steps = x.abs().amax(1, keepdim=True).double() / 127
    return (x.double() / steps).round() * steps


def assert_close(found: Tensor, wanted: Tensor, *, within: float = 1e-5) -> None:
    assert (found.double() - wanted).abs().max() < within * wanted.abs().max()


@grid(form=FORMS, num_rows=ROWS, sizes=[(16, 16), (48, 1024), (544, 256)])
def test_products_are_those_of_the_weights(form: str, num_rows: int, sizes: tuple[int, int]) -> None:
    sizes = sizes[0], max(sizes[1], 128 if form == "nibbles" else 0)  # a group
    weight, bias = numbers(*sizes), numbers(sizes[0])
    x, residual = numbers(num_rows, sizes[1]), numbers(num_rows, sizes[0])
    linear = made(form, weight, bias)
    wanted = rows_in(form, x) @ stands_for(form, weight).t() + bias
    # A number halfway between two steps may be rounded to either.
    within = 2e-3 if form == "dots" else 1e-5
    assert_close(linear(x), wanted, within=within)
    assert_close(linear.add(x, residual), wanted + residual, within=within)


def test_a_checkpoint_in_4_bits_is_multiplied_as_it_is_with_all_its_zeros() -> None:
    codes, zeros = torch.arange(48 * 256).view(48, 256).remainder(16).to(torch.uint8), torch.arange(96).view(48, 2) % 17
    scales, x = numbers(48, 2).abs().half().float(), numbers(5, 256)
    linear = made("nibbles", int4_rows.pack(codes, scales, zeros))
    weight = (codes.unflatten(1, (2, 128)) - zeros[..., None]).double() * scales[..., None].double()
    assert_close(linear(x), x.double() @ weight.flatten(1).t())


@grid(form=FORMS, num_rows=ROWS[1:])
def test_a_row_has_the_same_bits_alone(form: str, num_rows: int) -> None:
    linear, x = made(form, numbers(272, 512)), numbers(num_rows, 512)
    x[1] *= 100
    assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))


@grid(form=FORMS, num_threads=[1, 2, 3])
def test_the_number_of_threads_does_not_show(form: str, num_threads: int) -> None:
    linear, x = made(form, numbers(1040, 512)), numbers(5, 512)
    wanted, before = linear(x), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(linear(x), wanted)
    finally:
        torch.set_num_threads(before)


class Norm:
    """A module of transformers."""

    weight = numbers(256)
    variance_epsilon = 1e-5


@grid(form=FORMS, num_rows=[1, 5], gates=[False, True])
def test_norm_and_gate_around_a_product_are_torchs(form: str, num_rows: int, gates: bool) -> None:
    norm, weight, x = RmsNorm(Norm()), numbers(544, 256), numbers(num_rows, 256)
    apart, fused = made(form, weight), made(form, weight)
    y = apart(norm(x))
    wanted = functional.silu(y[:, :272]) * y[:, 272:] if gates else y
    assert fused.take_in(norm.weight_E, norm.least_square, gates=gates)
    assert_close(fused.fused(x), wanted.double(), within=5e-3 if form == "dots" else 1e-5)


@grid(form=FORMS, num_rows=[2, 5])
def test_a_fused_row_has_the_same_bits_alone(form: str, num_rows: int) -> None:
    norm, x = RmsNorm(Norm()), numbers(num_rows, 256)
    linear = made(form, numbers(544, 256))
    linear.take_in(norm.weight_E, norm.least_square, gates=True)
    assert torch.equal(linear.fused(x), torch.cat([linear.fused(row) for row in x.split(1)]))


@grid(form=FORMS, bad=[float("nan"), float("inf")])
def test_an_input_that_is_no_number_spoils_its_row_alone(form: str, bad: float) -> None:
    linear, x = made(form, numbers(48, 128)), numbers(3, 128)
    wanted = linear(x)
    x[1, 7] = bad
    y = linear(x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], wanted[[0, 2]])


def test_gates_are_kept_strictly_in_range() -> None:
    """The ends of the exponential: silu is the gate itself far above zero, and nothing far below."""
    linear = made("halves", torch.cat([torch.eye(16) * 500, torch.eye(16)]))
    linear.take_in(torch.ones(16), 0.0, gates=True)
    x = torch.zeros(2, 16)
    x[0, 3], x[1, 3] = 1.0, -1.0
    # A row with one number has length 1, so gate and up are 500 and 1, or both negative.
    found = linear.fused(x)[:, 3]
    assert found[0] == 500.0
    assert found[1].abs() < 1e-30


def test_layers_of_no_whole_blocks_take_another_kernel() -> None:
    assert native_of(make_linear(numbers(48, 64), None))
    for sizes in ((40, 64), (48, 40)):
        assert native_of(make_linear(numbers(*sizes), None)) is None
        assert native_of(int8_weight_only_linear(numbers(*sizes), None)) is None
        assert native_of(int8_linear(numbers(*sizes), None)) is None


def test_what_is_held_is_a_byte_a_weight_and_a_scale_an_output() -> None:
    for form in ("bytes", "dots"):
        linear = made(form, numbers(48, 64))
        assert sum(part.nbytes for part in vars(linear).values() if isinstance(part, Tensor)) == 48 * 64 + 4 * 48


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_16_bits_are_converted(dtype: torch.dtype) -> None:
    weight, bias, x = numbers(48, 192).to(dtype), numbers(48).to(dtype), numbers(5, 192).to(dtype)
    linear = int8_weight_only_linear(weight, bias)
    assert native_of(linear)
    y = linear.add(x, torch.ones(5, 48, dtype=dtype))
    assert y.dtype is dtype
    reference = x.double() @ (weight.double()).t() + bias.double() + 1
    assert (y - reference).abs().max() < 0.02 * reference.abs().max()

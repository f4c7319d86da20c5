"""Holds compiled products to products in fp64, rows to the same rows alone, and machines without them to a sentence."""

import logging
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.cpu_kernels.compiled import has_features
from llama_ssp.cpu_kernels.products import FEATURES
from llama_ssp.models.linear import HalfLinear, Linear, make_linear
from llama_ssp.models.llama.rotary import RmsNorm
from llama_ssp.models.native import linear as native
from llama_ssp.models.native.linear import NativeLinear, native_floats, native_of
from llama_ssp.models.quantization import weight_only
from llama_ssp.models.quantization.precision import Int8Linear, Precision
from llama_ssp.models.quantization.weight_only import Int8WeightOnlyLinear
from llama_ssp.weights import int4_rows
from tests.helpers.lanes import grid

FORMS = ("singles", "halves", "bytes", "dots", "nibbles")
ROWS = (1, 2, 5, 6, 9, 14)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def made(form: str, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
    # Not `product_of`: a wrong kernel must fail here, where a run would do without it.
    if not has_features(FEATURES[form]):
        pytest.skip("this processor has no such product")
    quantization = {"bytes": "int8_weight_only", "dots": "int8", "nibbles": "int4_weight_only"}
    kernel = Precision(quantization=quantization[form]).kernel if form in quantization else partial(native_floats, form)
    linear = native_of(make_linear(weight, bias, kernel=kernel))
    assert linear
    return linear


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


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Products that are looked for anew, in the test and after it."""
    native.product_of.cache_clear()
    yield
    native.product_of.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_the_compiler_other_kernels_compute_the_same_and_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, x = numbers(48, 192).bfloat16().float(), numbers(5, 192)
    kernels: dict[str, Linear] = {"halves": make_linear(weight, None)}
    wanted = kernels["halves"](x), made("bytes", weight)(x)
    native.product_of.cache_clear()
    for name in ("compiled", "operator", "products", "emit"):
        monkeypatch.delitem(sys.modules, f"llama_ssp.cpu_kernels.{name}", raising=False)
        monkeypatch.delattr(f"llama_ssp.cpu_kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with caplog.at_level(logging.WARNING):
        half, byte = make_linear(weight, None), Int8WeightOnlyLinear(weight, None)
        Int8WeightOnlyLinear(weight, None)
    assert isinstance(half, HalfLinear)
    assert byte.native is None
    torch.testing.assert_close((half(x), byte(x)), wanted, rtol=1e-4, atol=1e-4)
    (message,) = {record.message for record in caplog.records}
    assert "without compiled kernels" in message
    assert "llvmlite" in message


@pytest.mark.usefixtures("forgotten")
def test_a_kernel_that_is_wrong_on_this_machine_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "pack", lambda _kind, values_OI: values_OI)
    assert native.product_of("bytes") is None
    assert "wrong on this CPU" in caplog.text


def test_layers_of_no_whole_blocks_take_another_kernel() -> None:
    assert native_of(make_linear(numbers(48, 64), None))
    for sizes in ((40, 64), (48, 40)):
        assert native_of(make_linear(numbers(*sizes), None)) is None
        assert Int8WeightOnlyLinear(numbers(*sizes), None).native is None
        assert Int8Linear(numbers(*sizes), None).native is None


def test_what_is_held_is_a_byte_a_weight_and_a_scale_an_output() -> None:
    for form in ("bytes", "dots"):
        linear = made(form, numbers(48, 64))
        assert sum(part.nbytes for part in vars(linear).values() if isinstance(part, Tensor)) == 48 * 64 + 4 * 48


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_16_bits_are_converted(dtype: torch.dtype) -> None:
    weight, bias, x = numbers(48, 192).to(dtype), numbers(48).to(dtype), numbers(5, 192).to(dtype)
    linear = Int8WeightOnlyLinear(weight, bias)
    assert linear.native
    y = linear.add(x, torch.ones(5, 48, dtype=dtype))
    assert y.dtype is dtype
    reference = x.double() @ (weight.double()).t() + bias.double() + 1
    assert (y - reference).abs().max() < 0.02 * reference.abs().max()


def test_the_library_operator_serves_layers_without_a_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "native_linear", lambda *_: None)
    weight, x = numbers(48, 192).bfloat16(), numbers(5, 192).bfloat16()
    linear = Int8WeightOnlyLinear(weight, None)
    assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))

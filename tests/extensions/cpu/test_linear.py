"""Holds every version of a linear layer to products in fp64, rows to the same rows alone, and the choice of a version.

`made` skips versions that this processor has no instructions for, and no others: a wrong kernel fails here.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.extensions.cpu.code import kinds
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.linear import CompiledLinear, fits, native_floats, product_of
from llama_ssp.kernels.linear import (
    HalfLinear,
    Linear,
    PackedLinear,
    PlainLinear,
    can_halve,
    can_pack,
    half_scale,
    make_linear,
    native_of,
)
from llama_ssp.kernels.parts import RmsNorm
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.storage.formats import Product, format_of, formats
from tests.helpers.extensions import need
from tests.helpers.four_bits import rounded
from tests.helpers.lanes import pairs

OTHERS = {"plain": PlainLinear, "packed": PackedLinear, "half": HalfLinear}
QUANTIZED = {form.compiled.kind: form.name for form in formats().values() if form.compiled}
PRODUCTS = {product.kind: product for product in (kinds.IN_FP32, kinds.IN_FP16)}
PRODUCTS |= {form.compiled.kind: form.compiled for form in formats().values() if form.compiled}
COMPILED = (*PRODUCTS,)
# Of the result's size: two orders of one sum, and `dots` may round a number halfway between two steps to either.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def made(version: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
    can_be_had = {"packed": can_pack(weight.dtype), "half": can_halve()}
    if not can_be_had.get(version, True):
        pytest.skip("this build of torch has no such product")
    if version in OTHERS:
        return make_linear(weight, bias, kernel=OTHERS[version])
    return native(version, weight, bias)


def native(kind: str, weight: Tensor, bias: Tensor | None = None) -> CompiledLinear:
    if not has_features((product := PRODUCTS[kind]).needs):
        pytest.skip("this processor has no such product")
    found = native_of(quantized(kind, weight, bias) if kind in QUANTIZED else native_floats(product, weight, bias))
    assert isinstance(found, CompiledLinear)
    return found


def stands_for(version: str, weight: Tensor) -> Tensor:
    """The weights in fp64: of quantized ones what the layer without a compiled product maps unit vectors to."""
    if version not in QUANTIZED:
        return (weight.half() if version in {"half", "halves"} else weight).double()
    if version == "dots":  # elsewhere LLM.int8()
        return in_steps(weight)
    with pytest.MonkeyPatch.context() as patch:
        module, _, _ = str(format_of(QUANTIZED[version]).kernel).partition(":")
        patch.setattr(f"{module}.compiled_for", lambda *_: None)
        linear = quantized(version, weight)
    assert native_of(linear) is None
    return linear(torch.eye(weight.shape[1])).t().double()


def quantized(kind: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
    rows = rounded(kind, weight) if PRODUCTS[kind].codes == kinds.E2M1 else weight
    return make_linear(rows, bias, kernel=Precision(quantization=QUANTIZED[kind]).kernel)


def in_steps(rows: Tensor) -> Tensor:
    """127 steps of each row up to its largest number."""
    steps = rows.abs().amax(1, keepdim=True).double() / 127
    return (rows.double() / steps).round() * steps


def assert_close(found: Tensor, wanted: Tensor, *, within: float = TOLERANCES[torch.float32]) -> None:
    assert found.is_contiguous()
    assert (found.double() - wanted).abs().max() < within * wanted.abs().max()


@pairs(
    version=[*OTHERS, *COMPILED],
    num_rows=[1, 2, 5, 6, 9, 14, 40],
    sizes=[(16, 128), (48, 1024), (544, 256)],
    has_bias=[True, False],
)
def test_every_version_computes_the_product_of_its_weights(
    version: str, num_rows: int, sizes: tuple[int, int], has_bias: bool
) -> None:
    num_outputs, num_inputs = sizes
    weight, bias = numbers(*sizes), numbers(num_outputs) if has_bias else None
    x, residual = numbers(num_rows, num_inputs), numbers(num_rows, num_outputs)
    layer = made(version, weight, bias)
    rows = in_steps(x) if version == "dots" else x.double()
    wanted = functional.linear(rows, stands_for(version, weight), None if bias is None else bias.double())
    within = 2e-3 if version == "dots" else TOLERANCES[torch.float32]
    assert_close(layer(x), wanted, within=within)
    assert_close(layer(x, residual.clone()), wanted + residual, within=within)


@pairs(version=["plain", "packed"], dtype=[torch.bfloat16, torch.float16], num_rows=[1, 5, 40])
def test_rows_in_16_bits_have_results_in_16_bits(version: str, dtype: torch.dtype, num_rows: int) -> None:
    weight, bias = numbers(48, 96, dtype=dtype), numbers(48, dtype=dtype)
    x, residual = numbers(num_rows, 96, dtype=dtype), numbers(num_rows, 48, dtype=dtype)
    found = made(version, weight, bias)(x, residual.clone())
    assert found.dtype is dtype
    wanted = x.double() @ weight.double().t() + bias.double() + residual
    assert_close(found, wanted, within=TOLERANCES[dtype])


@pytest.mark.skipif(not can_halve(), reason="this build has no product with a weight in fp16")
@pairs(size=[1e-3, 1.0, 1e4], dtype=[torch.bfloat16, torch.float16])
def test_a_weight_of_a_16_bit_checkpoint_is_kept_in_16_bits_and_computes_as_in_fp32(
    size: float, dtype: torch.dtype
) -> None:
    weight, bias = (numbers(1030, 96) * size).to(dtype).float(), numbers(1030)
    x, residual = numbers(5, 96), numbers(5, 1030)
    form = make_linear(weight, bias)
    assert isinstance(form, HalfLinear)  # 1030 outputs are no whole blocks of the compiled kernel
    wanted = functional.linear(x.double(), weight.double(), bias.double())
    assert_close(form(x), wanted, within=1e-6)
    assert_close(form(x, residual.clone()), wanted + residual, within=1e-6)


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
        assert isinstance(make_linear(numbers(40, 24), None), PlainLinear)
    finally:
        can_pack.cache_clear()


NORM = RmsNorm(numbers(256), 1e-5)


def fused(kind: str, *, gates: bool) -> CompiledLinear:
    """A layer with the norm before it, and the gate behind it."""
    found = native(kind, numbers(544, 256))
    assert found.take_in(NORM.weight_E, NORM.least_square, gates=gates)
    return found


@pairs(kind=COMPILED, num_rows=[1, 5], gates=[False, True])
def test_norm_and_gate_around_a_product_are_torchs(kind: str, num_rows: int, gates: bool) -> None:
    x = numbers(num_rows, 256)
    y = native(kind, numbers(544, 256))(NORM(x))
    wanted = functional.silu(y[:, :272]) * y[:, 272:] if gates else y
    within = 5e-3 if kind == "dots" else 1e-5
    assert_close(fused(kind, gates=gates).fused(x), wanted.double(), within=within)


@pairs(kind=COMPILED, num_threads=[1, 3])
def test_many_rows_that_threads_share_before_the_product_have_the_bits_of_few(kind: str, num_threads: int) -> None:
    product, x, before = fused(kind, gates=True).fused, numbers(600, 256), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(product(x), torch.cat([product(rows) for rows in x.split(50)]))
    finally:
        torch.set_num_threads(before)


@pairs(kind=COMPILED, num_rows=[2, 5, 6, 9, 14], is_fused=[False, True])
def test_a_row_has_the_same_bits_alone(kind: str, num_rows: int, is_fused: bool) -> None:
    product = fused(kind, gates=True).fused if is_fused else native(kind, numbers(272, 256))
    x = numbers(num_rows, 256)
    x[1] *= 100
    assert torch.equal(product(x), torch.cat([product(row) for row in x.split(1)]))


@pytest.mark.parametrize("kind", ["bytes", "fp8"])
def test_the_bits_do_not_depend_on_how_many_registers_a_cpu_has(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products cut rows and blocks by the number of registers; any CPU can run both cuts."""
    need("eight_bits")
    layers = [fused(kind, gates=gates) for gates in (False, True)]
    monkeypatch.setattr("llama_ssp.extensions.cpu.code.linear.has_features", lambda names: not has_features(names))
    cut_otherwise = product_of(PRODUCTS[kind]._replace(kind=f"{kind}_cut_otherwise"))
    assert cut_otherwise is not None
    for layer, num_rows in ((layer, rows) for layer in layers for rows in range(1, 15)):
        x = numbers(num_rows, 256)
        wanted = layer.fused(x)
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_operator", cut_otherwise)
            assert torch.equal(layer.fused(x), wanted)


@pairs(kind=COMPILED, bad=[float("nan"), float("inf")])
def test_an_input_that_is_no_number_spoils_its_row_alone(kind: str, bad: float) -> None:
    layer, x = native(kind, numbers(48, 128)), numbers(3, 128)
    wanted = layer(x)
    x[1, 7] = bad
    y = layer(x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], wanted[[0, 2]])


def test_gates_are_kept_strictly_in_range() -> None:
    """The ends of the exponential: silu is the gate itself far above zero, and nothing far below."""
    layer = native("halves", torch.cat([torch.eye(16) * 500, torch.eye(16)]))
    layer.take_in(torch.ones(16), 0.0, gates=True)
    x = torch.zeros(2, 16)
    x[0, 3], x[1, 3] = 1.0, -1.0
    # A row with one number has length 1, so gate and up are 500 and 1, or both negative.
    found = layer.fused(x)[:, 3]
    assert found[0] == 500.0
    assert found[1].abs() < 1e-30


def test_the_record_of_a_format_is_all_that_a_compiled_product_needs() -> None:
    """Of a kind that no module names: its check has compared it with products of torch."""
    own = Product("own", kinds.E4M3, needs=("f16c",), group=64)
    if not has_features(own.needs):
        pytest.skip("this processor has no such product")
    assert product_of(own) is not None
    assert (fits(own, torch.Size((16, 192))), fits(own, torch.Size((16, 96)))) == (True, False)

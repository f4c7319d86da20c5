"""Holds every form of a linear layer to the library's own, and the choice among them to staying what it was."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.models import linear
from llama_ssp.models.linear import (
    ColumnsLinear,
    HalfLinear,
    Kernel,
    PackedLinear,
    PlainLinear,
    can_halve,
    can_pack,
    half_scale,
    make_linear,
)
from tests.helpers.lanes import grid

KERNELS: list[Kernel] = [PlainLinear, ColumnsLinear, PackedLinear]
# Largest difference of two orders of one sum of 96 products of size 1, in units of the result's size.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _nothing_is_chosen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_fastest", {})


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


def test_the_fastest_form_is_found_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.Size] = []
    find = linear._find_fastest

    def watched(kernels: list[Kernel], weight: Tensor) -> Kernel:
        timed.append(weight.shape)
        return find(kernels, weight)

    monkeypatch.setattr(linear, "_find_fastest", watched)
    forms = [make_linear(numbers(40, 24), None) for _ in range(3)]
    make_linear(numbers(24, 40), None)
    assert timed == [(40, 24), (24, 40)]
    assert len({type(form) for form in forms}) == 1


def test_the_form_with_the_least_time_is_chosen() -> None:
    class Slow(PlainLinear):
        def __call__(self, x_MI: Tensor) -> Tensor:
            for _ in range(20):
                super().__call__(x_MI)
            return super().__call__(x_MI)

    for slow, fast in ((0, 1), (1, 0)):
        kernels: list[Kernel] = [PlainLinear, PlainLinear]
        kernels[slow] = Slow
        assert linear._find_fastest(kernels, numbers(64, 64)) is kernels[fast]


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


def test_a_weight_that_stays_in_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[list[Kernel]] = []

    def find(kernels: list[Kernel], _weight: Tensor) -> Kernel:
        offered.append(kernels)
        return kernels[0]

    monkeypatch.setattr(linear, "_find_fastest", find)
    weight = numbers(64, 64)
    form = make_linear(weight, None, keeps_weight=True)
    assert PackedLinear not in offered[0]
    assert isinstance(form, PlainLinear)
    assert form.weight_OI.data_ptr() == weight.data_ptr()


def test_off_the_cpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_find_fastest", lambda *_args: pytest.fail("a kernel was timed"))
    assert type(make_linear(torch.empty(8, 8, device="meta"), None)) is PlainLinear

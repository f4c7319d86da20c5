"""Holds every quantized form to its definition, to rows that know nothing of each other, and to slices and joins."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from llama_ssp.kernels.linear import Linear, make_linear
from llama_ssp.models.quantization import weight_only
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.storage.formats import INT4_GROUPS, formats
from llama_ssp.weights import byte_rows
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.lanes import pairs

pytestmark = of_all_formats
FORMS = [form.name for form in formats().values() if form.is_quantized and not form.is_stored_alone]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_form = pytest.mark.parametrize("form", FORMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Largest error of a weight in units of its row's (its group's) largest: half a step. A step of nf4 is 0.3 at most, one
# of int4 2 / 15.
WEIGHT_ERRORS = {
    "int8": 0.5 / 127,
    "nf4": 0.152,
    "int8_weight_only": 0.5 / 127,
    "int4_weight_only": 1 / 15,
    "fp8_weight_only": 16 / 448,
    "fp4": 1 / 6,
}
GROUPS = {"nf4": 64, "fp4": 64, "fp8_weight_only": 128, "int4_weight_only": 128}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make(form: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
    return make_linear(weight, bias, kernel=Precision(quantization=form).kernel)


def unpacked(linear: Linear, num_inputs: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights that a form stands for: what it maps unit vectors to."""
    return linear(torch.eye(num_inputs, dtype=dtype)).t()


@pytest.mark.seconds
@every_form
def test_no_weight_is_further_off_than_half_a_step(form: str) -> None:
    weight = numbers(48, 256)
    found = unpacked(make(form, weight), 256)
    largest = weight.unflatten(1, (-1, GROUPS.get(form, 256))).abs().amax(-1, keepdim=True)
    errors = (found - weight).unflatten(1, (largest.shape[1], -1)).abs() / largest
    # Products of bitsandbytes are made of fp16 scales and fp32 sums; unit vectors are exact in all formats.
    assert 0.2 * WEIGHT_ERRORS[form] < errors.max() < 1.1 * WEIGHT_ERRORS[form]


@pairs(form=FORMS, dtype=DTYPES, num_rows=[1, 2, 8, 9, 40], has_bias=[False, True])
def test_products_are_those_of_the_weights_that_the_form_stands_for(
    form: str, dtype: torch.dtype, num_rows: int, has_bias: bool
) -> None:
    weight, bias = numbers(48, 256, dtype=dtype), numbers(48, dtype=dtype) if has_bias else None
    x, residual = numbers(num_rows, 256, dtype=dtype), numbers(num_rows, 48, dtype=dtype)
    linear = make(form, weight, bias)
    wanted = x.double() @ unpacked(make(form, weight), 256, dtype=dtype).double().t()
    if bias is not None:
        wanted += bias
    # Rounding of weights and sum to the number format; int8 rounds its inputs to 1/254 of the largest of a row too.
    tolerance = max(0.03 if form == "int8" else 0.0, 2 * torch.finfo(dtype).eps, 1e-5)
    for found, reference in ((linear(x), wanted), (linear(x, residual), wanted + residual)):
        assert found.dtype is dtype
        assert found.is_contiguous()
        assert (found - reference).abs().max() < tolerance * reference.abs().max()


@every_dtype
@pytest.mark.parametrize("num_inputs", [1, 15, 33, 40])
def test_rows_of_weights_may_end_anywhere(num_inputs: int, dtype: torch.dtype) -> None:
    """The library's operator for bytes reads behind a row that is no multiple of 16, and ends the process or worse."""
    weight, x = numbers(9, num_inputs, dtype=dtype), numbers(3, num_inputs, dtype=dtype)
    linear = make("int8_weight_only", weight)
    wanted = x.double() @ weight.double().t()
    assert (linear(x) - wanted).abs().max() < 0.02 * wanted.abs().max()


@every_dtype
def test_small_weights_keep_their_127_steps(dtype: torch.dtype) -> None:
    """Scales down to 1e-6, where fp16 has subnormal numbers alone."""
    weight = numbers(64, 128) * torch.logspace(0, -4, 64)[:, None]
    found = unpacked(make("int8_weight_only", weight.to(dtype)), 128)
    errors = (found - weight.to(dtype)).abs().amax(1) / weight.abs().amax(1)
    assert errors.max() < (0.03 if dtype is torch.float16 else 0.01)


@every_dtype
@every_form
def test_a_row_does_not_depend_on_the_rows_beside_it(form: str, dtype: torch.dtype) -> None:
    """To the last bit, with large numbers in the other rows."""
    linear = make(form, numbers(96, 128, dtype=dtype), numbers(96, dtype=dtype))
    x = numbers(5, 128, dtype=dtype)
    beside = x.clone()
    beside[1:] *= 100
    assert torch.equal(linear(beside)[0], linear(x)[0])


@every_form
def test_layers_with_one_input_may_be_joined_before_or_after(form: str) -> None:
    # Layers of no whole blocks of 16 outputs go through bitsandbytes, which rounds elsewhere.
    odd = 48 if form == "int8" else 31
    parts, x = [numbers(rows, 128) for rows in (64, 32, odd)], numbers(9, 128)
    whole = make(form, torch.cat(parts))
    found = torch.cat([unpacked(make(form, part), 128) for part in parts])
    assert torch.equal(unpacked(whole, 128), found)
    torch.testing.assert_close(whole(x), torch.cat([make(form, part)(x) for part in parts], 1), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("elements", [128, 1000, 2**19])
@every_form
def test_how_many_rows_are_quantized_at_a_time_does_not_show(
    form: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = numbers(33, 128)
    wanted = unpacked(make(form, weight), 128)
    monkeypatch.setattr(weight_only, "_QUANTIZED_ELEMENTS", {"cpu": elements})
    monkeypatch.setattr(weight_only, "_UNPACKED_ELEMENTS", {"cpu": elements})
    assert torch.equal(unpacked(make(form, weight), 128), wanted)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_large_outputs_stay_in_the_range_of_fp16(num_rows: int) -> None:
    # Of 192 inputs of 4 and weights of 0.3, 230 each; inputs times bytes would sum up to 97536.
    weight, x = torch.full((48, 192), 0.3, dtype=torch.float16), torch.full((num_rows, 192), 4.0, dtype=torch.float16)
    y = make("int8_weight_only", weight)(x)
    torch.testing.assert_close(y, x @ weight.t(), rtol=2e-3, atol=0)


def test_a_row_of_zeros_stays_zero() -> None:
    weight = numbers(16, 128)
    weight[3] = 0
    for form in FORMS:
        y = make(form, weight)(torch.cat([numbers(1, 128), torch.zeros(1, 128)]))
        assert torch.equal(y[:, 3], torch.zeros(2))
        assert torch.equal(y[1], torch.zeros(16))


@pytest.mark.slow
def test_bitsandbytes_is_imported_without_a_way_to_the_hub_and_in_silence() -> None:
    program = (
        "import sys, types, logging; sys.modules['huggingface_hub.fake'] = None\n"
        "from llama_ssp.models.quantization.precision import bitsandbytes\n"
        "import importlib.abc\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        assert name != 'kernels', 'the hub was asked for kernels'\n"
        "sys.meta_path.insert(0, Watch())\n"
        "bitsandbytes()\n"
        "assert 'kernels' not in sys.modules\n"
        "assert logging.getLogger('bitsandbytes').level == logging.NOTSET\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pairs(dtype=[torch.float32, torch.bfloat16, torch.float16], num_rows=[1, 40], group=INT4_GROUPS)
def test_a_weight_is_rounded_once(dtype: torch.dtype, num_rows: int, group: int) -> None:
    """Products are those of scale * (code - zero), computed in fp32 and rounded to the dtype."""
    generator, num_groups = torch.Generator().manual_seed(0), 256 // group
    codes = torch.randint(0, 16, (33, 256), generator=generator, dtype=torch.uint8)
    scales = torch.rand(33, num_groups, generator=generator).half().float()
    zeros = torch.randint(0, 17, (33, num_groups), generator=generator)
    weight = ((codes.unflatten(1, (num_groups, -1)) - zeros[..., None]) * scales[..., None]).flatten(1).to(dtype)
    x = torch.randn(num_rows, 256, generator=generator).to(dtype)
    kernel = Precision(quantization="int4_weight_only").kernel
    assert kernel
    linear = kernel(byte_rows.pack_int4(codes, scales, zeros), None)
    assert torch.equal(linear(torch.eye(256, dtype=dtype)).t(), weight)
    wanted = x.double() @ weight.double().t()
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    assert (linear(x) - wanted).abs().max() < 2 * tolerance * wanted.abs().max()


@pytest.mark.parametrize(("num_inputs", "group"), [(384, 128), (448, 64), (416, 32)])
def test_no_group_is_further_off_than_half_a_step_and_groups_are_as_large_as_the_inputs_allow(
    num_inputs: int, group: int
) -> None:
    weight = torch.randn(48, num_inputs, generator=torch.Generator().manual_seed(1))
    weight[:, 128:256] += 3  # all positive, so that the least step is zero
    found = make("int4_weight_only", weight)(torch.eye(num_inputs)).t()
    groups = weight.unflatten(1, (-1, group))
    steps = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
    errors = (found - weight).unflatten(1, (-1, group)).abs().amax(2)
    assert (errors <= 0.501 * steps + 1e-6).all()
    assert (errors > 0.3 * steps).all()

"""Int4 layers: the nearest weights, and their products."""

import pytest
import torch

from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.quantization.weight_only import int4_weight_only_linear
from llama_ssp.storage.formats import INT4_GROUPS
from llama_ssp.weights import int4_rows
from tests.helpers.lanes import pairs

pytestmark = pytest.mark.seconds


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
    linear = kernel(int4_rows.pack(codes, scales, zeros), None)
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
    found = int4_weight_only_linear(weight, None)(torch.eye(num_inputs)).t()
    groups = weight.unflatten(1, (-1, group))
    steps = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
    errors = (found - weight).unflatten(1, (-1, group)).abs().amax(2)
    assert (errors <= 0.501 * steps + 1e-6).all()
    assert (errors > 0.3 * steps).all()

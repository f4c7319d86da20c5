"""A key in fewer bits is near itself, and has the bytes that plans count."""

import pytest
import torch

from llama_ssp.kernels.rows import rows_of
from llama_ssp.storage.formats import CACHES

STEPS = {"auto": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127, "fp8": 16 / 448}
"""The most that a number may differ by, in largest numbers of its row."""


@pytest.mark.parametrize("name", CACHES.all())
def test_a_row_is_near_its_numbers_and_has_the_planned_bytes(name: str) -> None:
    x = (
        torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 100.0])[:, None, None]
    )
    rows = rows_of(name, torch.float32)
    packed = rows.pack(x)
    assert packed.dtype is rows.stored_dtype
    assert packed.shape == (3, 2, rows.width(64))
    assert packed[0, 0].nbytes == CACHES.of(name).row_bytes(64, value_bytes=4)
    apart = (rows.unpack(packed, torch.float32) - x).abs() / x.abs().amax(-1, keepdim=True)
    assert float(apart.max()) <= STEPS[name] * (1 + 1e-6)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_zeros_stay_zeros_and_what_is_no_number_shows(name: str) -> None:
    rows = rows_of(name, torch.float32)
    assert not rows.unpack(rows.pack(torch.zeros(2, 16)), torch.float32).any()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16)
        x[3] = bad
        assert not rows.unpack(rows.pack(x), torch.float32).isfinite().any()

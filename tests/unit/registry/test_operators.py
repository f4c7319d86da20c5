"""Operators of a device: who asks gets what a record makes, once, and torch's version where there is none."""

import pytest
import torch
from torch import Tensor

from llama_ssp.kernels.linear import Kernel, PlainLinear, make_linear
from llama_ssp.registry.operators import OPERATORS, DeviceOperator, made


class Doubled(PlainLinear):
    """A wrong product."""

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """Twice the product."""
        return 2 * super().__call__(x_MI, residual_MO)


def of_large(weight_OI: Tensor, **_how: object) -> Kernel | None:
    """A product of the large weights alone."""
    return Doubled if len(weight_OI) > 2 else None


def test_a_record_makes_what_its_condition_lets_it_and_torch_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    record = DeviceOperator(operation="linear", device="meta", make=f"{__name__}:of_large")
    assert made("linear", "meta", torch.ones(3, 3)) is None
    monkeypatch.setitem(OPERATORS.records, record.name, record)
    kinds = [type(make_linear(torch.empty(size, 3, device="meta"), None)) for size in (2, 3)]
    assert kinds == [PlainLinear, Doubled]

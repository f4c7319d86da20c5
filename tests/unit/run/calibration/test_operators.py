"""Operators, rates and messages are timed as runs use them, and take off what they should."""

import time

import pytest
import torch
from torch import Tensor

from llama_ssp.kernels.linear import product_of
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.calibration import operators
from llama_ssp.storage.formats import formats


def test_rates_are_bytes_operations_and_calls_over_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "seconds_per_call", lambda _call, **_options: 0.5)
    device = torch.device("cpu")
    assert operators.copy_bytes_per_s(device, num_bytes=4096) == 2 * 4096 / 0.5, "read once and written once"
    assert operators.flops_per_s(torch.float32, device) == 2 * 1024**3 / 0.5, "a product and a sum"
    assert operators.launch_s(device) == operators.kernel_s(device) == 0.5 / 200


def test_every_format_that_has_a_kernel_has_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the floats of 4 bits too, to which no weight is quantized."""
    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    monkeypatch.setattr(operators, "_SPEED_SIDE", 128)
    found = operators.cpu_speeds(num_bytes=2**16)
    compiled = [record for record in formats().values() if record.compiled and product_of(record.compiled)]
    assert found.keys() == {"fp32", "fp16", *(record.name for record in compiled)}
    assert found.get("mxfp4") == found.get("int4_weight_only")


def test_a_message_that_a_neighbour_delays_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, num_calls = 0.0, 0

    def all_reduce(values: Tensor) -> Tensor:
        nonlocal now_s, num_calls
        num_calls += 1
        now_s += 1.0 if num_calls % 40 == 0 else 1e-5
        return values

    monkeypatch.setattr(operators, "seconds_per_call", lambda _call: 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    comm = Comm.single()
    object.__setattr__(comm, "all_reduce", all_reduce)  # the class is frozen
    found = operators._summed_s(comm, torch.zeros(2))
    assert num_calls > 40
    assert found == pytest.approx(1e-5)

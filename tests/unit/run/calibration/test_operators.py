"""Operators, rates and messages are timed as runs use them, and take off what they should."""

import time

import pytest
import torch
from torch import Tensor

from llama_ssp.machines.profile import LinearPoint
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.calibration import operators
from llama_ssp.run.calibration.model_pairs import HEAD_DIM

pytestmark = pytest.mark.seconds


def test_a_call_is_timed_without_what_comes_between_two_calls() -> None:
    done: list[str] = []

    def pause(name: str, seconds: float) -> None:
        done.append(name)
        time.sleep(seconds)

    seconds = operators.seconds_per_call(
        lambda: pause("call", 0.002), budget_s=1e-9, between=lambda: pause("between", 0.02)
    )
    assert done == ["call", *["between", "call"] * 3]
    assert 0.002 <= seconds < 0.015


def test_rates_are_bytes_operations_and_calls_over_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "seconds_per_call", lambda _call, **_options: 0.5)
    device = torch.device("cpu")
    assert operators.copy_bytes_per_s(device, num_bytes=4096) == 2 * 4096 / 0.5, "read once and written once"
    assert operators.flops_per_s(torch.float32, device) == 2 * 1024**3 / 0.5, "a product and a sum"
    assert operators.launch_s(device) == operators.kernel_s(device) == 0.5 / 200
    monkeypatch.setattr(operators, "ELEMENTS", (4096,))
    points = operators.linear_points("fp32", [2**17])
    assert [(point.rows, point.s) for point in points] == [(rows, 0.25) for rows in operators.ROWS], "two in a call"


def test_attention_costs_by_the_bytes_of_keys_and_values_that_are_read_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_attend_s", lambda rows, num_slots, num_heads: 7.0 + rows * num_slots * num_heads)
    slot_bytes = 2 * HEAD_DIM * 4
    points = operators.attention_points()
    assert [point.size for point in points] == list(operators.OPERATOR_ROWS)
    assert [point.s for point in points] == pytest.approx([rows / slot_bytes for rows in operators.OPERATOR_ROWS])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_attention_is_timed_by_the_operator_that_forwards_use(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, num_slots, num_heads, calls = 5, 128, 4, list[tuple[Tensor, ...]]()
    attention = (lambda *arguments: calls.append(arguments)) if is_compiled else None
    monkeypatch.setattr(operators, "find_attention", lambda *_: attention)
    monkeypatch.setattr(operators, "BUDGET_S", 0.0)
    assert operators._attend_s(rows, num_slots, num_heads) > 0
    assert bool(calls) == is_compiled
    for qkv, _turns, positions, *_others in calls:
        assert qkv.shape == (rows, 3 * num_heads * HEAD_DIM)
        assert positions[0].tolist() == [123, 124, 125, 126, 127]
    assert len({call[4].data_ptr() for call in calls}) == min(len(calls), operators.NUM_CACHES), "layers take turns"


def test_a_message_that_a_neighbour_delays_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, num_calls = 0.0, 0

    def all_reduce(values: Tensor) -> Tensor:
        nonlocal now_s, num_calls
        num_calls += 1
        now_s += 1.0 if num_calls % 40 == 0 else 1e-5
        return values

    monkeypatch.setattr(operators, "MESSAGE_BYTES", (8,))
    monkeypatch.setattr(operators, "seconds_per_call", lambda _call: 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    comm = Comm.single()
    object.__setattr__(comm, "all_reduce", all_reduce)  # the class is frozen
    (point,) = operators.all_reduce_points(comm, torch.device("cpu"))
    assert num_calls > 40
    assert point.s == pytest.approx(1e-5)


def test_matrices_are_taken_off_a_layers_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 0.003, operators.MANY_LAYERS: 0.003 + 0.001 * (operators.MANY_LAYERS - 1)}
    monkeypatch.setattr(operators, "_stack", lambda _width, num_layers: num_layers)
    monkeypatch.setattr(operators, "_forward_s", lambda stack, _rows, _between: seconds[stack])
    linear = [LinearPoint(dtype="fp32", rows=1, elements=4096, working_set_bytes=2**22, s=1e-5)]
    layers, frames = operators.operator_points(linear)
    assert {point.width for point in layers} == set(operators.WIDTHS)
    assert [point.s for point in layers] == pytest.approx([0.001 - 4e-5] * len(layers))
    assert [point.s for point in frames] == pytest.approx([0.002 - 1e-5] * len(frames))

"""What a CPU's products are measured by."""

import pytest
from torch import Tensor

from llama_ssp.kernels.linear import Linear
from llama_ssp.registry import operators
from llama_ssp.run import calibration


def test_layers_of_torch_alone_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch packs a weight in fp32, and copies none that is packed."""
    monkeypatch.setattr(operators, "made", lambda *_, **__: None)
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    monkeypatch.setattr(calibration, "_SPEED_SIDE", 128)
    numbers, in_turn = list[int](), calibration._in_turn

    def counted(layers: list[Linear], x: Tensor) -> calibration.Call:
        numbers.append(len({*layers}))
        return in_turn(layers, x)

    monkeypatch.setattr(calibration, "_in_turn", counted)
    assert calibration.cpu_speeds(num_bytes=2**18).keys() == {"fp32", "fp16"}
    assert numbers == [3, 3, 5, 5]

"""What a CPU's products are measured by."""

import pytest

from llama_ssp import operators
from llama_ssp.run import calibration


def test_layers_of_torch_alone_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch packs a weight in fp32, and copies none that is packed."""
    monkeypatch.setattr(operators, "made", lambda *_, **__: None)
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    monkeypatch.setattr(calibration, "_SPEED_SIDE", 128)
    layers, in_turn = list[int](), calibration._in_turn
    monkeypatch.setattr(calibration, "_in_turn", lambda made, x: (layers.append(len({*made})), in_turn(made, x))[1])
    assert calibration.cpu_speeds(num_bytes=2**18).keys() == {"fp32", "fp16"}
    assert layers == [3, 3, 5, 5]

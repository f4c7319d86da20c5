"""Layer-wise placement: every layer is somewhere once, and devices hold the whole model."""

import pytest

from llama_ssp.machines import hardware
from llama_ssp.planning.memory import memory, split_layers
from llama_ssp.settings.schema import TargetKind
from tests.helpers.planning import make_spec


@pytest.mark.parametrize("num_devices", [1, 2, 3, 9])
def test_every_layer_is_in_one_place_and_devices_hold_as_many(num_devices: int) -> None:
    row = split_layers(7, num_devices=num_devices)
    assert [layer for part in row for layer in part] == list(range(7))
    assert len(row) == num_devices
    assert max(map(len, row)) - min(len(part) for part in row if part) <= 1


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_what_devices_hold_is_the_whole_model(num_devices: int) -> None:
    spec = make_spec("13B", num_ranks=num_devices, target_kind=TargetKind.accelerate, cuda_graphs=False)
    held = [rank.target_weights_bytes for rank in memory(spec, hardware.load("p4d_24xlarge"))]
    assert sum(held) == 26_031_728_640

"""Settings of weights of 4 bits."""

import pytest

from llama_ssp.settings import checks
from tests.helpers.composed import compose_run


@pytest.mark.parametrize("name", ["int4_weight_only", "mxfp4", "nvfp4"])
def test_a_sound_config_passes(name: str) -> None:
    checks.check(*compose_run(f"model.quantization={name}"), world_size=2)

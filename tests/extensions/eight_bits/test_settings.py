"""Settings of weights of a byte, and the models whose entries have them."""

import pytest

from llama_ssp.settings import checks
from tests.helpers.composed import compose_run


@pytest.mark.parametrize("words", ["model=30B_8bit draft=7B", "draft.model.quantization=int8_weight_only"])
def test_a_sound_config_passes(words: str) -> None:
    checks.check(*compose_run(*words.split()), world_size=2)

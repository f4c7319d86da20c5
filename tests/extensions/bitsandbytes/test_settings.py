"""Settings of bitsandbytes."""

from llama_ssp.settings import checks
from tests.helpers.composed import compose_run


def test_a_sound_config_passes() -> None:
    checks.check(*compose_run("model.quantization=nf4", "model.path=DIR", "chat=true"), world_size=2)

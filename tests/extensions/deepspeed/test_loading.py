"""What stops DeepSpeed from sharing a target, each in a sentence; and on one rank what it must leave alone."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError, PlacementError
from llama_ssp.extensions.deepspeed import loading
from llama_ssp.extensions.deepspeed.loading import check, load
from llama_ssp.models.weights import Loading
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.models import build_checkpoint
from tests.helpers.shapes import llama_shape

NONE = "none"


def check_on(shape: ModelShape, *, quantization: str, num_ranks: int) -> None:
    world: Any = SimpleNamespace(device=torch.device("cuda"))
    ranks = tuple(range(num_ranks))
    check(world, Layout(target_ranks=ranks, draft_ranks=(), draft_kind=DraftLayout.one_rank), shape, quantization)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were there."""
    monkeypatch.setattr(loading, "find_spec", lambda _name: object())


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"needs the package deepspeed: \./machine-install\.sh --deepspeed"):
        check_on(llama_shape(), quantization=NONE, num_ranks=1)


@pytest.mark.usefixtures("installed")
def test_uneven_heads_are_refused_with_the_sizes_that_work() -> None:
    shape = llama_shape(num_attention_heads=12, num_key_value_heads=6)
    for num_ranks in (1, 2, 3, 6):
        check_on(shape, quantization=NONE, num_ranks=num_ranks)
    for num_ranks in (4, 5, 12):
        with pytest.raises(PlacementError, match=rf"6 key-value heads .* {num_ranks} ranks .*: use 1, 2, 3, 6 ranks"):
            check_on(shape, quantization=NONE, num_ranks=num_ranks)


@pytest.mark.usefixtures("installed")
def test_quantized_layers_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"those of the target are int8: use model.quantization=none"):
        check_on(llama_shape(), quantization="int8", num_ranks=1)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: ./machine-install.sh --deepspeed")
def test_rotary_frequencies_stay_in_fp32_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_checkpoint(tmp_path, "llama")
    capsys.readouterr()
    cpu = torch.device("cpu")
    runner = load(Loading(inspect(tmp_path), dtype=torch.bfloat16, device=cpu))
    model = runner._model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    frequencies = [buffer for name, buffer in model.named_buffers() if "inv_freq" in name]
    assert frequencies
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}
    assert capsys.readouterr().out == ""

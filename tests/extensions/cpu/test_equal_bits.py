"""What `reproducible=true` lacks on this machine is one sentence of a dry run, of a run and of the library alike."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llama_ssp import load
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.cpu import equal_bits
from llama_ssp.settings.checks import check_values
from tests.helpers.doors import config_of
from tests.helpers.extensions import need
from tests.helpers.in_process import launch
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.tokenizers import save_tokenizer

MACHINES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "no llvmlite": ("needs llvmlite", lambda patch: patch.setattr(equal_bits, "find_spec", lambda _: None)),
    "no instructions": (
        "needs a processor with fma",
        lambda patch: patch.setattr(equal_bits, "has_features", lambda _: False),
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_door_says_what_the_machine_lacks(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, take_out = MACHINES[machine]
    take_out(monkeypatch)
    for dry in ([], ["dry_run=true"]):
        ended = launch("reproducible=true", *dry, f"run_dir={tmp_path / 'run'}")
        assert (ended.code, f"reproducible=true {words}" in ended.err) == (2, True), ended.err
    with pytest.raises(ConfigError, match=f"^reproducible=True {words}"):
        load("tiny", reproducible=True)
    assert launch("dry_run=true", f"run_dir={tmp_path / 'run'}").code == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["model.quantization=nf4"], "needs a format with compiled products"),
        (["draft.model.quantization=nf4"], "draft.model.quantization=nf4 has none"),
        ([], None),
        (["speculation.tree=2x1"], None),
    ],
)
def test_settings_that_are_in_the_way_are_named(given: list[str], words: str | None) -> None:
    if any("nf4" in setting for setting in given):
        need("bitsandbytes")
    config = config_of(["reproducible=true", *given])
    if words is None:
        check_values(config)
        return
    with pytest.raises(ConfigError, match=words):
        check_values(config)


def test_the_library_refuses_sizes_and_modules_of_transformers(tmp_path: Path) -> None:
    for family, words in (("llama", "has head_dim=8"), ("lfm2", "lfm2 models run on the modules of transformers")):
        build_checkpoint(tmp_path / family, family)
        save_tokenizer(tmp_path / family, VOCAB_SIZE)
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / family, reproducible=True)
        load(tmp_path / family)

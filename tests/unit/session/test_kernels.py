"""A run on GPUs uses one choice of kernels: on all its ranks, and when it is resumed."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.reports.records import RunFolder
from llama_ssp.session.kernels import settle_kernels

Choices = dict[str, list[int]]
OURS: Choices = {"GPU: qkv, 16 rows": [32, 128, 5], "GPU: down, 16 rows": []}
THEIRS: Choices = {"GPU: qkv, 16 rows": [], "GPU: head, 16 rows": [64, 64, 4]}


class Model:
    """A lean decoder, with what it has chosen."""

    def __init__(self, chosen: Choices) -> None:
        self.chosen = dict(chosen)

    def kernel_choices(self) -> Choices:
        return self.chosen

    def use_kernel_choices(self, choices: Choices) -> None:
        if [1, 2, 3] in choices.values():
            raise ValueError("it has no tile [1, 2, 3]")
        self.chosen = {key: choices.get(key, tile) for key, tile in self.chosen.items()}


class TwoRanks:
    """Rank 0 of two; the other has chosen `theirs`."""

    rank, size = 0, 2

    def __init__(self, theirs: Choices) -> None:
        self._theirs = theirs

    def gather_text(self, text: str) -> list[str]:
        return [text, json.dumps(self._theirs) if text.startswith("{") else ""]

    def broadcast_text(self, text: str, *, src: int) -> str:
        assert src == 0
        return text


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path / "run", "seed: 1\n") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ssp.models.llama.decoder.LeanRunner", Model)


def settled(ours: Choices, theirs: Choices, folder: RunFolder | None) -> Choices:
    """What this rank uses in the end."""
    model: Any = Model(ours)
    comm: Any = TwoRanks(theirs)
    other: Any = object()
    settle_kernels([model, other], comm=comm, folder=folder)
    return dict(model.chosen)


def test_all_ranks_take_the_choices_of_the_first(folder: RunFolder) -> None:
    assert settled(OURS, THEIRS, folder) == OURS
    assert json.loads((folder.path / "kernels.json").read_text()) == THEIRS | OURS
    assert settled(OURS, THEIRS, None) == OURS


def test_a_resumed_run_uses_the_kernels_that_it_began_with(folder: RunFolder) -> None:
    settled(OURS, OURS, folder)
    written = (folder.path / "kernels.json").read_text()
    measured_now = {key: [64, 64, 4] for key in OURS}
    assert settled(measured_now, measured_now, folder) == OURS
    assert (folder.path / "kernels.json").read_text() == written


def test_a_run_that_is_resumed_on_another_gpu_chooses_again_and_says_so(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    settled(OURS, OURS, folder)
    other = {key.replace("GPU", "other GPU"): [64, 64, 4] for key in OURS}
    with caplog.at_level(logging.WARNING):
        assert settled(other, other, folder) == other
    assert "this run began on another GPU" in caplog.text
    assert json.loads((folder.path / "kernels.json").read_text()) == OURS | other


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"GPU: qkv": 1}', '{"GPU: qkv": [1, 2, 3]}', '{"GPU: qkv": [[32], 128, 5]}']
)
def test_damaged_choices_are_a_sentence(content: str, folder: RunFolder) -> None:
    (folder.path / "kernels.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^kernels\.json of run_dir is damaged \(.*\): delete it to choose again"):
        settled(OURS, OURS, folder)

"""Checkpoints that the tests of models and weights share; they are read only."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.helpers.models import build_checkpoint

Saved = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A folder with a tiny fp32 checkpoint of a family, and the model as the library holds it."""

    @cache
    def build(family: str) -> Saved:
        folder = tmp_path_factory.mktemp(family)
        return folder, build_checkpoint(folder, family)

    return build

"""Composes run configs as `llama-ssp run` does, without a process."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache

import hydra
import pytest
from omegaconf import DictConfig

from llama_ssp.settings.schema import RunConfig
from tests.helpers.composed import compose_run as composed

Compose = Callable[..., tuple[RunConfig, frozenset[str]]]


@pytest.fixture(scope="module")
def compose_run() -> Iterator[Compose]:
    """A function from words to the config and the keys that they set, which composes each set of options once."""

    @cache
    def compose_once(root: str, chosen: tuple[str, ...]) -> DictConfig:
        return hydra.compose(root, [*chosen])

    with pytest.MonkeyPatch.context() as patch:
        once = lambda root, chosen, **_: deepcopy(compose_once(root, tuple(chosen)))  # noqa: E731 - one line
        patch.setattr("llama_ssp.settings.compose.compose_options", once)
        yield composed

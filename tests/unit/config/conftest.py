"""Composes run configs as `launch/run.py` does, without a process."""

from collections.abc import Callable, Iterator

import pytest
from hydra import compose, initialize_config_dir

from llama_ssp.config import catalogue, store
from llama_ssp.config.schema import RunConfig

Compose = Callable[..., tuple[RunConfig, frozenset[str]]]


@pytest.fixture
def compose_run() -> Iterator[Compose]:
    """Return a function from overrides to the config and the keys that they set."""
    store.register()

    def compose_one(*overrides: str) -> tuple[RunConfig, frozenset[str]]:
        explicit = frozenset(override.partition("=")[0] for override in overrides)
        config = compose("config", list(overrides))
        return store.to_run_config(config, explicit=explicit), explicit

    with initialize_config_dir(str(catalogue.conf_dir()), version_base="1.3"):
        yield compose_one

"""Composes run configs as `launch/run.py` does, without a process."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from llama_ssp.config import folders, store
from llama_ssp.config.schema import RunConfig

Compose = Callable[..., tuple[RunConfig, frozenset[str]]]


@pytest.fixture
def compose_run() -> Compose:
    """Return a function from overrides to the config and the keys that they set."""
    store.register()

    def compose_one(*overrides: str) -> tuple[RunConfig, frozenset[str]]:
        explicit = frozenset(override.partition("=")[0] for override in overrides)
        with initialize_config_dir(str(folders.conf_dir()), version_base="1.3"):
            config = compose("config", list(overrides))
            return store.to_run_config(config, explicit=explicit), explicit

    return compose_one


@pytest.fixture(scope="module")
def compose_once() -> Compose:
    """The same function, quicker: it composes each set of options once and sets values in a copy, as Hydra does.

    `test_values_set_in_a_copy_are_those_that_hydra_composes` holds the two to the same configs.
    """
    store.register()
    groups = {path.name for path in folders.conf_dir().iterdir() if path.is_dir()}
    parser = OverridesParser.create()

    @cache
    def compose_options(*options: str) -> DictConfig:
        with initialize_config_dir(str(folders.conf_dir()), version_base="1.3"):
            return compose("config", list(options))

    def compose_one(*overrides: str) -> tuple[RunConfig, frozenset[str]]:
        keys = [override.partition("=")[0] for override in overrides]
        pairs = list(zip(keys, overrides, strict=True))
        config = deepcopy(compose_options(*(override for key, override in pairs if key in groups)))
        for value in parser.parse_overrides([override for key, override in pairs if key not in groups]):
            OmegaConf.update(config, value.key_or_group, value.value(), merge=True)
        explicit = frozenset(keys)
        return store.to_run_config(config, explicit=explicit), explicit

    return compose_one

"""Composes the settings of one run as `llama-ssp run` does."""

import shlex

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.settings import checks
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import RunConfig


def compose_run(*words: str) -> tuple[RunConfig, frozenset[str]]:
    (composed,) = compose(words)
    return to_run_config(composed), composed.explicit


def check_refused(words: str, sentence: str) -> None:
    """Check that a run of two ranks is refused, by one problem that has this sentence in it."""
    with pytest.raises(ConfigError) as caught:
        checks.check(*compose_run(*shlex.split(words)), world_size=2)
    assert sentence in str(caught.value), caught.value
    assert "\n" not in str(caught.value), "one mistake must give one problem"

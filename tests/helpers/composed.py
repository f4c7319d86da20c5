"""Composes the settings of one run as `llama-ssp run` does."""

from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import RunConfig


def compose_run(*words: str) -> tuple[RunConfig, frozenset[str]]:
    (composed,) = compose(words)
    return to_run_config(composed), composed.explicit

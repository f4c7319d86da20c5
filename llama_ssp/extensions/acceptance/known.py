"""Finds a pair's acceptance in the trace that a run or plan names, else in a stored one. Imports nothing slow."""

from functools import partial
from typing import TYPE_CHECKING

from llama_ssp.extensions.acceptance.records import stored_file
from llama_ssp.settings.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_ssp.planning.acceptance import Acceptance
    from llama_ssp.planning.spec import PlannedPair


def of_run(config: RunConfig) -> "Callable[[PlannedPair], Acceptance | None]":
    """Return the function that returns the acceptance of pairs for a config; raises the errors of `plans.of_trace`."""
    if (folder := getattr(config, "trace", None)) is None:  # the library's settings lack the extensions' ones
        return partial(_stored, config)
    from llama_ssp.extensions.acceptance.plans import of_trace

    return of_trace(config, folder)


def _stored(config: RunConfig, pair: "PlannedPair") -> "Acceptance | None":
    """Return the acceptance of a pair by its stored trace; None if no trace is stored."""
    if not (file := stored_file(pair.target, pair.draft)).is_file():
        return None
    from llama_ssp.extensions.acceptance.plans import in_file

    return in_file(config, file, pair)

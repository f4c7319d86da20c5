"""Who knows pairs: the trace that a run or a plan names, else the stored ones, which few have. Imports nothing slow."""

from functools import partial
from typing import TYPE_CHECKING

from llama_ssp.rooms.acceptance.records import stored_file
from llama_ssp.settings.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_ssp.planning.acceptance import Acceptance
    from llama_ssp.planning.spec import PlannedPair


def of_run(config: RunConfig) -> "Callable[[PlannedPair], Acceptance | None]":
    """Who knows pairs for a config; raises as `plans.of_trace`."""
    if (folder := getattr(config, "trace", None)) is None:  # the library's settings are without those of rooms
        return partial(_stored, config)
    from llama_ssp.rooms.acceptance.plans import of_trace

    return of_trace(config, folder)


def _stored(config: RunConfig, pair: "PlannedPair") -> "Acceptance | None":
    """What the stored trace of a pair says; None without one."""
    if not (file := stored_file(pair.target, pair.draft)).is_file():
        return None
    from llama_ssp.rooms.acceptance.plans import in_file

    return in_file(config, file, pair)

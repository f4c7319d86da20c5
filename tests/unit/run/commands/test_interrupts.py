"""Signals while the settings of a run are read: the run ends alike, whatever libraries make of the interrupt."""

import signal
from contextlib import suppress

import pytest
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.errors import ConfigError
from llama_ssp.settings import compose
from tests.helpers.in_process import Ended, launch

pytestmark = pytest.mark.seconds

INTERRUPTED = Ended(code=4, err="interrupted\n")


@pytest.mark.parametrize("error", [UnboundLocalError("f"), OmegaConfBaseException("flags"), ConfigError("no file")])
def test_an_interrupt_that_a_library_replaces_ends_the_run_alike(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cleaned_up_too_early(_root: str) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise error

    monkeypatch.setattr(compose, "register", cleaned_up_too_early)
    assert launch() == INTERRUPTED


def test_an_interrupt_that_a_library_loses_keeps_the_task_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(root: str) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        register(root)

    register = compose.register
    monkeypatch.setattr(compose, "register", deaf)
    assert launch("dry_run=true") == INTERRUPTED

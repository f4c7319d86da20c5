"""`llama-ssp report` for tests of other extensions and of the core, skipped where its extension is missing."""

import pytest

from llama_ssp.reports.formats import FORMATS
from tests.helpers.extensions import module_of


def report(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    command = module_of("reports.command")
    code: int = command.main(arguments)
    return code


def without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs write no reports, whose figures take seconds."""
    FORMATS.all()
    monkeypatch.setattr(FORMATS, "records", {})

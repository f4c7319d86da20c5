"""A sweep that is submitted to a stand-in for sbatch."""

from pathlib import Path

import pytest

from tests.helpers.sbatch import Sweep, sweeps


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """A function that submits a sweep with a stand-in for sbatch, in an empty folder."""
    return sweeps(monkeypatch, tmp_path, capsys)

"""What a run leaves when its last step, the report, fails."""

import sys
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.reports.folder import RunFolder
from llama_ssp.run.commands import run

pytestmark = pytest.mark.seconds


def test_a_run_that_cannot_draw_its_report_is_done_and_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib")

    monkeypatch.setattr(RunFolder, "write_report", fail)
    settings = ["task=generate", "prompt=import os", "max_new_tokens=2", f"run_dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["run.py", *settings])
    assert run.main() == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "drawing needs matplotlib: pip install matplotlib; llama-ssp report writes report.html later"
    assert (tmp_path / "run" / "status").read_text() == "done\n"
    assert (tmp_path / "run" / "summary.json").exists()

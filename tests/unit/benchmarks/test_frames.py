"""A reader follows at most fifteen functions from the entry of a run to the draw of a drafted id."""

import re
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT


@pytest.mark.heavy
def test_a_drafted_id_is_drawn_at_most_fifteen_frames_deep() -> None:
    command = [sys.executable, "-m", "benchmarks.frames"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    *frames, total = printed
    assert frames[0].startswith("llama_ssp/run/commands/run.py:")
    assert re.fullmatch(r"llama_ssp/speculate/sampling/processors.py:\d+ draw", frames[-1])
    assert any("llama_ssp/speculate/drafters/model.py" in frame for frame in frames)
    assert total == f"{len(frames)} frames"
    assert len(frames) <= 15

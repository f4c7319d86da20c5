"""What a reader has to follow stays within its bounds."""

import re
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT


@pytest.mark.heavy
def test_walks_are_no_longer_than_they_may_be() -> None:
    command = [sys.executable, "-m", "benchmarks.walks"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    walks = dict(re.findall(r"^(\w+): (\d+ of at most \d+)\n", printed, re.MULTILINE))
    assert walks.keys() == {"plan", "weight", "K", "draw"}
    for name in ("weight", "K", "draw"):
        number, most = map(int, walks[name].split(" of at most "))
        assert 0 < number <= most, printed
    for step in ("llama_ssp/planning/", "llama_ssp/weights/source.py", "llama_ssp/kernels/linear.py", "/schema.py"):
        assert step in printed
    frames = printed.partition("draw: ")[2].splitlines()[1:]
    assert "llama_ssp/run/commands/run.py:" in frames[0]
    assert re.search(r"llama_ssp/speculate/sampling/processors.py:\d+ draw$", frames[-1])
    assert any("llama_ssp/speculate/drafters/" in frame for frame in frames)

"""An interpreter without docstrings is refused in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds

SENTENCE = "Python removes docstrings (PYTHONOPTIMIZE=2, or python -OO), and transformers has no models without them: "
RUN = ["launch/run.py", "max_new_tokens=4"]


def python(words: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run Python without docstrings."""
    environment = {**os.environ, "PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    "words", [RUN, ["-m", "llama_ssp", "run", "ranks=2"], ["-m", "llama_ssp", "calibrate"]], ids=" ".join
)
def test_a_run_without_docstrings_is_refused_in_a_sentence(tmp_path: Path, words: list[str]) -> None:
    ended = python([*words, f"run_dir={tmp_path / 'run'}"])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"{SENTENCE}leave it out, or use PYTHONOPTIMIZE=1\n"
    assert not (tmp_path / "run").exists()


def test_the_library_without_docstrings_says_the_same() -> None:
    code = "from llama_ssp import load\nfrom llama_ssp.errors import ConfigError\n"
    code += "try:\n    load('tiny')\nexcept ConfigError as error:\n    print(error)"
    ended = python(["-c", code])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(SENTENCE)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["launch/plan.py", "model=7B", "draft=none", "hardware=p4d_24xlarge"], "ms/token"),
        ([*RUN, "dry_run=true"], "tokens per round"),
        (["-m", "llama_ssp", "--help"], "llama-ssp calibrate"),
    ],
)
def test_planning_and_help_need_no_docstrings(words: list[str], wanted: str) -> None:
    ended = python(words)
    assert ended.returncode == 0, ended.stderr
    assert wanted in " ".join(ended.stdout.split())

"""An interpreter without docstrings is refused in a sentence."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_ssp import load
from llama_ssp.errors import ConfigError
from llama_ssp.settings import checks
from tests.helpers.lanes import heavy
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds

SENTENCE = "Python removes docstrings (PYTHONOPTIMIZE=2, or python -OO), and transformers has no models without them: "


def python(words: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run Python without docstrings."""
    environment = {**os.environ, "PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    "words",
    [["launch/run.py", "max_new_tokens=4"], heavy(["-m", "llama_ssp", "run", "ranks=2"]),
     heavy(["-m", "llama_ssp", "calibrate"])],
    ids=" ".join,
)  # fmt: skip
def test_a_run_without_docstrings_is_refused_in_a_sentence(tmp_path: Path, words: list[str]) -> None:
    ended = python([*words, f"run_dir={tmp_path / 'run'}"])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"{SENTENCE}leave it out, or use PYTHONOPTIMIZE=1\n"
    assert not (tmp_path / "run").exists()


def test_the_library_without_docstrings_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with pytest.raises(ConfigError, match=r"Python removes docstrings \(PYTHONOPTIMIZE=2"):
        load("tiny")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["launch/plan.py", "model=7B", "draft=none", "hardware=p4d_24xlarge"], "ms/token"),
        heavy(["launch/run.py", "max_new_tokens=4", "dry_run=true"], "tokens per round"),
        heavy(["-m", "llama_ssp", "--help"], "llama-ssp calibrate"),
    ],
)
def test_planning_and_help_need_no_docstrings(words: list[str], wanted: str) -> None:
    ended = python(words)
    assert ended.returncode == 0, ended.stderr
    assert wanted in " ".join(ended.stdout.split())

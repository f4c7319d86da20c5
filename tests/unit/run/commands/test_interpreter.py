"""An ASCII locale is no obstacle to UTF-8, and an interpreter without docstrings is refused in a sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds

ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_DOCSTRINGS = {"PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"}
SENTENCE = "Python removes docstrings (PYTHONOPTIMIZE=2, or python -OO), and transformers has no models without them: "
PROMPT = "def tête():  # 🙂"
RUN = ["launch/run.py", "max_new_tokens=4"]


def python(
    words: list[str], environment: dict[str, str], *, stdin: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run Python in an environment; what it writes must be UTF-8."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **environment}, input=stdin, capture_output=True,
        encoding="utf-8", timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("source", ["words", "file", "standard input"])
def test_utf8_is_read_and_written_in_an_ascii_locale(tmp_path: Path, source: str) -> None:
    folder, file = tmp_path / "tête", tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\n", encoding="utf-8")
    given = {"words": f"prompt={PROMPT}", "file": f"prompts={file}", "standard input": "prompts=-"}[source]
    words = [*RUN, "task=compare", given, "stop_strings=['ê']", f"run_dir={folder}"]
    ended = python(words, ASCII, stdin=f"{PROMPT}\n" if source == "standard input" else "")
    assert ended.returncode == 0, ended.stderr
    assert PROMPT in ended.stdout
    assert str(folder) in ended.stderr
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == [PROMPT] * 2
    assert "- ê\n" in (folder / "config.yaml").read_text(encoding="utf-8")


def test_bytes_that_are_not_utf8_are_still_refused_in_an_ascii_locale(tmp_path: Path) -> None:
    ended = python([*RUN, "task=generate", os.fsdecode(b"prompt=t\xff"), f"run_dir={tmp_path / 'run'}"], ASCII)
    assert (ended.returncode, ended.stderr) == (
        2,
        "prompt 't\\udcff' holds '\\udcff', a lone surrogate: write it in UTF-8\n",
    )


@pytest.mark.parametrize(
    "words",
    [
        RUN,
        ["-m", "llama_ssp", "run", "ranks=2"],
        ["-m", "llama_ssp", "calibrate"],
    ],
    ids=" ".join,
)
def test_a_run_without_docstrings_is_refused_in_a_sentence(tmp_path: Path, words: list[str]) -> None:
    ended = python([*words, f"run_dir={tmp_path / 'run'}"], NO_DOCSTRINGS)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"{SENTENCE}leave it out, or use PYTHONOPTIMIZE=1\n"
    assert not (tmp_path / "run").exists()


def test_the_library_without_docstrings_says_the_same() -> None:
    code = "from llama_ssp import load\nfrom llama_ssp.errors import ConfigError\n"
    code += "try:\n    load('tiny')\nexcept ConfigError as error:\n    print(error)"
    ended = python(["-c", code], NO_DOCSTRINGS)
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
    ended = python(words, NO_DOCSTRINGS)
    assert ended.returncode == 0, ended.stderr
    assert wanted in " ".join(ended.stdout.split())

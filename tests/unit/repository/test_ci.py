"""`.ci/run` installs what the tests need from the system, and the last word is that of the tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT, files

# What the step may use; none of what it is to install.
TOOLS = ("bash", "dirname", "git")


def test_the_browser_that_the_distribution_has_is_installed_and_nothing_keeps_others_out(tmp_path: Path) -> None:
    fakes = {
        "id": "echo 0",
        "apt-get": f'echo "$@" >>{tmp_path}/said; [[ $* != *munge* ]]',
        "apt-cache": '[[ "$*" != "show chromium-headless-shell" ]]',
    }
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    functions = (ROOT / ".ci/run").read_text().partition("\nstep install_system_packages")[0]
    (tmp_path / "steps" / "ci").mkdir(parents=True)
    script = tmp_path / "steps" / "ci" / "run"
    script.write_text(f"{functions}\ninstall_system_packages\n")
    done = subprocess.run(
        ["bash", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert re.findall(r"recommends (\S+)", (tmp_path / "said").read_text()) == [
        "shellcheck", "slurm-wlm", "munge", "chromium",
    ]  # fmt: skip
    assert done.stdout == "apt-get could not install munge\n"


def test_the_time_of_all_steps_stands_before_the_summary_of_the_tests(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    outside = {name: value for name, value in os.environ.items() if name != "CI_STARTED_S"}  # of .ci/run itself
    said = [
        subprocess.run(command, cwd=ROOT, env=outside | words, capture_output=True, text=True, check=True).stdout
        for words in ({}, {"CI_STARTED_S": "1e9"})
    ]
    assert ["all steps of .ci/run took" in text for text in said] == [False, True]
    assert "1 passed" in said[1].splitlines()[-1]


@pytest.mark.parametrize("name", [".ci/run", "justfile"])
def test_the_site_is_built_and_its_warnings_are_errors(name: str) -> None:
    (command,) = [line for line in (ROOT / name).read_text().splitlines() if "mkdocs build" in line]
    assert command.endswith(" -m mkdocs build --strict"), "--quiet would hide warnings from --strict"


def test_every_slow_proof_is_run_by_a_command() -> None:
    commands = "".join((ROOT / name).read_text() for name in ("justfile", ".ci/run"))
    marked = [str(path) for path in files() if path.match("test_*.py") and "mark.slow" in (ROOT / path).read_text()]
    marked.remove("tests/unit/repository/test_ci.py")
    assert len(marked) > 5
    assert [path for path in marked if path not in commands] == []
    named = set(re.findall(r"tests/\S+\.py", commands))
    assert {path for path in named if not (ROOT / path).exists()} == set()

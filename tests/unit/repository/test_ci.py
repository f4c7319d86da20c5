"""Lanes of the tests, and who runs them; the last word of `.ci/run` is that of the tests."""

import os
import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.helpers.lanes import grid
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds


@pytest.mark.heavy
def test_the_time_of_all_steps_stands_before_the_summary_of_the_tests(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    outside = {name: value for name, value in os.environ.items() if name != "CI_STARTED_S"}  # of .ci/run itself
    said = [
        subprocess.run(command, cwd=ROOT, env=outside | words, capture_output=True, text=True, check=True).stdout
        for words in ({}, {"CI_STARTED_S": "1e9"})
    ]
    assert ["all steps of .ci/run took" in text for text in said] == [False, True]
    assert "1 passed" in said[1].splitlines()[-1]


JOB = "tests/distributed/test_lanes.py"
LANES = """
import pytest

def test_always(): pass

@pytest.mark.heavy
def test_heavy(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.distributed(2)
@pytest.mark.parametrize("number", range(9))
def test_job(number, record_property): record_property("worker", __import__("os").environ.get("PYTEST_XDIST_WORKER"))
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "ended"),
    [
        ([], "10 passed, 2 deselected"),
        (["--heavy"], "11 passed, 1 deselected"),
        (["--slow"], "12 passed"),
        (["--heavy", "-m", "heavy"], "1 passed, 11 deselected"),
    ],
)
def test_each_lane_adds_its_tests(options: list[str], ended: str, tmp_path: Path) -> None:
    assert ended in lanes(tmp_path, tmp_path, *options)


@pytest.mark.heavy
def test_folders_are_shared_out_with_jobs_on_one_worker_and_files_that_were_named_are_not(tmp_path: Path) -> None:
    assert "created: " not in lanes(tmp_path, tmp_path / JOB, "-n", "auto")
    assert "created: 2/2 workers" in lanes(tmp_path, tmp_path, "-n", "2", f"--junit-xml={tmp_path}/report.xml")
    workers = re.findall(r'name="worker" value="(\w+)"', (tmp_path / "report.xml").read_text())
    assert (len(workers), len(set(workers))) == (9, 1)


def lanes(folder: Path, named: Path, *options: str) -> str:
    """What pytest prints about a file with tests of every lane."""
    (folder / JOB).parent.mkdir(parents=True, exist_ok=True)
    (folder / JOB).write_text(LANES)
    settings = ["-c", "pyproject.toml", f"--rootdir={folder}", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *settings, "-n0", *options]
    done = subprocess.run([*command, str(named)], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_in_a_grid_every_two_values_meet_in_a_case_that_runs_always_and_no_case_is_lost() -> None:
    axes = {"a": [1, 2, 3], "b": "xyz", "c": [False, True], "d": [None, 5]}
    cases = grid(**axes).args[1]
    assert [case.values for case in cases] == list(product(*axes.values()))
    always = [case.values for case in cases if not case.marks]
    assert all(mark.name == "heavy" for case in cases for mark in case.marks)
    assert len(always) < 13
    for one, other in combinations(range(4), 2):
        wanted = set(product(list(axes.values())[one], list(axes.values())[other]))
        assert {(case[one], case[other]) for case in always} == wanted

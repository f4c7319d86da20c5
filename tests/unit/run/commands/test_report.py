"""launch/report.py as a user calls it."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.run.commands import report
from tests.helpers.lanes import heavy
from tests.helpers.repository import ROOT
from tests.helpers.runs import FAST, PLAIN, write_run

# Packages that somebody who only looks at results need not have; None makes their import fail.
BLOCKED = ("torch", "transformers", "rich", "hydra", "omegaconf")


def test_a_sweep_becomes_one_page_and_one_table_and_says_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    for number in range(3):
        write_run(sweep / str(number), PLAIN, replace(FAST, ms=30.0 + number))
    (write_run(sweep / "3", PLAIN) / "summary.json").unlink()
    damaged = write_run(sweep / "\udcff", PLAIN, FAST, model="\ud800") / "summary.json"
    damaged.write_text(damaged.read_text().replace('"world_size": 2', '"world_size": {}'))
    for _ in range(2):  # a report is no run, and can be made again
        assert report.main([str(sweep)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {sweep}/report.html and runs.csv: 3 runs; left out: ")
    assert "cannot be read (world_size holds {}): a run of this version is required; " in said
    assert said.endswith("sweep/3 has no summary yet: done\n")
    assert "3 runs of big + small" in (sweep / "report.html").read_text()
    assert len((sweep / "runs.csv").read_text().splitlines()) == 1 + 3
    assert (report.main([str(damaged.parent)]), capsys.readouterr().err.count("\n")) == (2, 1)


def test_several_folders_become_one_report_where_the_user_says(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / name, PLAIN, FAST)) for name in ("a", "b")]
    assert report.main([*folders, f"--output={tmp_path / 'c'}"]) == 0
    page = (tmp_path / "c" / "report.html").read_text()
    assert ">a</td>" in page
    assert ">b</td>" in page
    assert not (tmp_path / "a" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{empty}"], "holds no run"),
        (["{run}", "{run}"], "2 folders need --output=DIR"),
        (["{run}", "--output"], "argument --output: expected one argument"),
        (["{run}", "--csv"], "unrecognized arguments: --csv; usage: llama-ssp report FOLDER... "),
        (["{run}", "--output={run}/status"], "cannot be written"),
        ([], "the following arguments are required: FOLDER"),
    ],
)
def test_a_mistake_is_one_sentence_with_code_2(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": write_run(tmp_path / "run", PLAIN), "empty": tmp_path / "empty"}
    places["empty"].mkdir()
    assert report.main([argument.format(**places) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert (len(said.err.splitlines()), said.out) == (1, "")


def ended_without(packages: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own that cannot import these packages."""
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({packages!r})); sys.argv[1:] = [{str(folder)!r}]; "
        f"runpy.run_path({str(ROOT / 'launch' / 'report.py')!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=folder)


def test_it_needs_what_reads_and_draws_and_nothing_that_computes(tmp_path: Path) -> None:
    ended = ended_without(BLOCKED, write_run(tmp_path / "run", PLAIN, FAST))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("package", [heavy("matplotlib"), "jinja2"])
def test_a_missing_package_is_named_with_what_installs_it(package: str, tmp_path: Path) -> None:
    ended = ended_without([package], write_run(tmp_path / "run", PLAIN, FAST))
    assert ended.returncode == 2
    assert f"needs {package}: pip install {package}" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1

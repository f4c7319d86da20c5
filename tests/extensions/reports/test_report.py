"""`llama-ssp report` as a user calls it, and its tables for a paper."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.reports import command, html
from llama_ssp.extensions.reports.papers import to_latex, to_markdown
from llama_ssp.extensions.reports.tables import runs_to_csv
from llama_ssp.registry import PLUGINS
from llama_ssp.reports.formats import FORMATS
from llama_ssp.reports.runs import Run, find_runs, varying_settings
from llama_ssp.reports.summary import accepted_by_position
from llama_ssp.reports.tables import repetitions_table
from tests.helpers.in_process import launch
from tests.helpers.lanes import heavy
from tests.helpers.repository import ROOT
from tests.helpers.runs import FAST, PLAIN, write_run
from tests.helpers.starters import run_file

# Packages that somebody who only looks at results need not have; None makes their import fail.
BLOCKED = ("torch", "transformers", "rich", "hydra", "omegaconf")


@pytest.mark.seconds
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
        assert command.main([str(sweep)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {sweep}/report.html and runs.csv: 3 runs; left out: ")
    assert "cannot be read (world_size holds {}): a run of this version is required; " in said
    assert said.endswith("sweep/3 has no summary yet: done\n")
    assert "3 runs of big + small" in (sweep / "report.html").read_text()
    assert len((sweep / "runs.csv").read_text().splitlines()) == 1 + 3
    assert (command.main([str(damaged.parent)]), capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.seconds
def test_several_folders_become_one_report_where_the_user_says(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / name, PLAIN, FAST)) for name in ("a", "b")]
    assert command.main([*folders, f"--output={tmp_path / 'c'}"]) == 0
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
    assert command.main([argument.format(**places) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert (len(said.err.splitlines()), said.out) == (1, "")


@pytest.mark.seconds
def test_it_needs_what_reads_and_draws_and_nothing_that_computes(tmp_path: Path) -> None:
    ended = run_file("report.py", str(write_run(tmp_path / "run", PLAIN, FAST)), without=BLOCKED, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.seconds
@pytest.mark.parametrize("package", [heavy("matplotlib"), "jinja2"])
def test_a_missing_package_is_named_with_what_installs_it(package: str, tmp_path: Path) -> None:
    ended = run_file("report.py", str(write_run(tmp_path / "run", PLAIN, FAST)), without=[package], cwd=tmp_path)
    assert ended.returncode == 2
    assert f"needs {package}: pip install {package}" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two runs that differ in a setting, the second one disturbed, of a model with odd characters in its name.

    Each has seven prompts of two kinds in both modes.
    """
    for number in range(2):
        lines = [
            replace(line, index=10 * place + index, category=kind, ms=line.ms + 5.0 * number + index)
            for place, kind in enumerate(("writing", "math_50%"))
            for index in range(7)
            for line in (PLAIN, FAST)
        ]
        folder = write_run(tmp_path / "sweep" / str(number), *lines, model="a_b&c")
        (folder / "config.yaml").write_text(f"seed: {7 + number}\n")
        summary = (folder / "summary.json").read_text().replace('"machine": null', '"machine": "1 rank on a CPU"')
        if number:
            summary = summary.replace('"disturbed": null', '"disturbed": "others ran"')
        (folder / "summary.json").write_text(summary)
    return tmp_path / "sweep"


def test_a_round_counts_at_every_position_that_it_reached() -> None:
    assert accepted_by_position([FAST, FAST]) == [2 / 3, 1 / 3], "rounds that accepted 2, 0 and 1 of 2"
    assert accepted_by_position([PLAIN]) == []


def test_points_that_differ_in_their_prompts_say_which_they_had(sweep: Path) -> None:
    """Its name is that of a figure that these tables leave out."""
    for number in range(2):
        (sweep / str(number) / "config.yaml").write_text(f"prompts: file{number}.txt\n")
    times, _, _ = to_markdown(find_runs([sweep])[0]).partition("\n\nShare")
    assert "| # | prompts | plain, ms/token |" in times
    assert "\n| --- | --- | ---: |" in times
    assert "\n| 1 | file0.txt | " in times


def test_markdown_has_figures_with_intervals_kinds_and_what_repeats_them(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(sweep), "--table=markdown"]) == 0
    text = capsys.readouterr().out
    assert not (sweep / "report.html").exists()
    times, means, positions, kinds, notes = [*text.split("\n\n| ")[1:], text.rpartition("\n\n")[2]]
    assert re.search(r"\n\| 2 † \| 8 \| 10.80 \(10.\d\d to 11.\d\d\) \| 4.80 ", times)
    assert "| 1 | 7 | 0.667 | 0.333 |" in positions
    assert re.search(r"\| 1 \| 7 \| math_50% \| 2.\d\dx \(.*\) \| 0.600 .* \| 3.00 \(3.00 to 3.00\) \| 7 \|", kinds)
    for said in ("a_b&c + small", "14 prompts", "torch ", "1 rank on a CPU", "† The machine was disturbed."):
        assert said in notes
    for table in (times, means, positions, kinds):
        assert len({line.count(" | ") for line in table.splitlines() if line.startswith("|")}) == 1


def test_latex_is_balanced_and_escaped(sweep: Path) -> None:
    text = to_latex(find_runs([sweep])[0])
    tables = re.findall(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\\end\{tabular\}", text, flags=re.DOTALL)
    assert len(tables) == 4
    for places, body in tables:
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(places)}
        assert len(rows) >= 2
    assert (text.count(r"\toprule"), text.count(r"\midrule"), text.count(r"\bottomrule")) == (4, 4, 4)
    text, captions = re.subn(r"\\caption\{([A-Za-z -]+)\}", r"\1", text)
    assert captions == 4
    fit = r"\\resizebox\{\\ifdim[^\n]*\n(.*?)\}\n(\\end\{table\})"
    text, fitted = re.subn(fit, r"\1\n\2", text, flags=re.DOTALL)
    assert fitted == 4, "a table wider than a line would leave the page"
    plain = re.sub(r"\\[a-z]+(\{[a-z|]*\})*|\\[%&_#$]|\$\\dagger\$|^%.*$", "", text, flags=re.MULTILINE)
    assert not re.search(r"[_%#$^~{}†]", re.sub(r"\{[lr]+\}", "", plain))
    assert r"a\_b\&c + small" in text
    assert r"math\_50\%" in text
    assert r"2 $\dagger$ & 8 & 10.80 [10." in text


def test_a_table_is_printed_and_not_written(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(sweep), "--table=latex", "--output=elsewhere"]) == 2
    assert "--table prints: leave --output out" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_run_that_cannot_draw_its_report_is_done_and_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib")

    monkeypatch.setattr(html, "report", fail)
    ended = launch("task=generate", "prompt=import os", "max_new_tokens=2", f"run_dir={tmp_path}/run")
    assert (ended.code, ended.status) == (0, "done\n")
    last = ended.err.splitlines()[-1]
    assert last == "drawing needs matplotlib: pip install matplotlib; llama-ssp report writes report.html later"
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.seconds
def test_a_format_from_outside_is_written_printed_and_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of the page."""
    page = (ROOT / "docs/extending.md").read_text().partition("## A report format")[2]
    example = page.partition("```python\n")[2].partition("```")[0]
    more = """
register(ReportFormat(name="names", write="my_reports:to_names"))
register(ReportFormat(name="each", write="my_reports:to_names", file="names.txt", purpose="its name"))


def to_names(runs, missing):
    return " ".join([*(run.name for run in runs), *missing])
"""
    (tmp_path / "my_reports.py").write_text(example + more)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, "my_reports")
    monkeypatch.setattr(FORMATS, "records", dict(FORMATS.all()))
    folder = write_run(tmp_path / "run", PLAIN, FAST)
    assert command.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert said == f"wrote {folder}/report.html, runs.csv, names.txt and runs.json: 1 run\n"
    assert json.loads((folder / "runs.json").read_text())["run"]["model"] == "big"
    assert (command.main([str(folder), "--table=names"]), capsys.readouterr().out) == (0, "run\n")
    assert "its name" in launch("--help", "all").out
    launch("task=generate", "prompt=x", "max_new_tokens=1", f"run_dir={tmp_path}/each").well()
    assert (tmp_path / "each" / "names.txt").read_text() == "each"


def test_a_plugin_that_cannot_be_imported_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PLUGINS, "no_such_reports")
    assert command.main(["--help"]) == 2
    assert "no_such_reports, which cannot be imported" in capsys.readouterr().err


def _drifted(folder: Path) -> list[Run]:
    """Two points of a sweep, whose plain completions took 2.45 times as long at the end."""
    kinds = [replace(line, category=kind, index=place) for line in (PLAIN, FAST) for place, kind in enumerate("ab" * 4)]
    for number in range(2):
        written = write_run(folder / str(number), *kinds)
        found = json.loads((written / "summary.json").read_text())
        ms = 2.45 * found["plain"]["ms_per_token"]
        found["baseline"] = {"folder": "first", "ms_per_token": ms} if number else None
        (written / "summary.json").write_text(json.dumps(found))
        settings = f"quiet: {'true' if number else 'false'}\ntimeouts:\n  load_s: {number}\n"
        (written / "config.yaml").write_text(f"seed: 7\nspeculation:\n  num_draft_tokens: {number + 2}\n{settings}")
    return find_runs([folder])[0]


@pytest.mark.seconds
def test_every_format_says_how_plain_drifted_and_gives_such_speed_ups_no_interval(tmp_path: Path) -> None:
    runs = _drifted(tmp_path / "sweep")
    said = "Plain completions of first took 145 "
    latex, markdown, page = to_latex(runs), to_markdown(runs), html.report(runs)
    assert all(said in text for text in (latex, markdown, page))
    first, second = csv.DictReader(io.StringIO(runs_to_csv(runs)))
    assert (bool(first["speedup_low"]), second["speedup_low"]) == (True, "")
    assert first["speedup"] == second["speedup"]
    assert first["speedup_of_a"]


@pytest.mark.seconds
def test_kinds_of_prompts_stand_in_every_format_and_what_changes_no_figure_in_none(tmp_path: Path) -> None:
    runs = _drifted(tmp_path / "sweep")
    assert [setting.name for setting in varying_settings(runs)] == ["K"]
    page = html.report(runs)
    assert "Kinds of prompts" in page
    assert "All runs: done." in page
    assert "Kinds of prompts" in to_latex(runs)
    assert "speedup_of_b" in runs_to_csv(runs)


@pytest.mark.seconds
def test_a_page_with_marks_says_what_they_mean(tmp_path: Path) -> None:
    for name in "ab":
        file = write_run(tmp_path / "sweep" / name, PLAIN, FAST) / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"disturbed": "others used it" * (name == "b")}))
    overview = html.report(find_runs([tmp_path / "sweep"])[0]).partition("Each run")[0]
    assert "† The machine was disturbed." in overview


@pytest.mark.seconds
def test_repetitions_have_means_with_intervals_over_seeds(tmp_path: Path) -> None:
    for seed, ms in enumerate((30.0, 40.0, 50.0)):
        file = write_run(tmp_path / "sweep" / str(seed), PLAIN, replace(FAST, ms=ms)) / "config.yaml"
        file.write_text(f"seed: {seed}\n")
    runs, _ = find_runs([tmp_path / "sweep"])
    (row,) = repetitions_table(runs).rows
    fast = repetitions_table(runs).columns.index("speculative, ms/token")
    half = 4.303 / 3**0.5  # Student's quantile, by a deviation of 1 ms/token
    assert (row[0].text, row[fast]) == ("3", (f"{4.0:.2f}", f"{4 - half:.2f} to {4 + half:.2f}"))
    assert "Means over seeds" in html.report(runs)
    assert "Means over seeds" in to_markdown(runs)


@pytest.mark.parametrize(("seeds", "num_seeds"), [((0, 0), None), ((0, 0, 1), "2")])
def test_runs_of_one_seed_are_one_repetition(seeds: tuple[int, ...], num_seeds: str | None, tmp_path: Path) -> None:
    for name, seed in zip("abc", seeds, strict=False):
        file = write_run(tmp_path / "sweep" / name, PLAIN, FAST) / "config.yaml"
        file.write_text(f"seed: {seed}\n")
    rows = repetitions_table(find_runs([tmp_path / "sweep"])[0]).rows
    assert [row[0].text for row in rows] == ([num_seeds] if num_seeds else [])


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["speed.pdf", "speed.svg", "speed.png"])
def test_a_report_draws_figures_into_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _drifted(tmp_path / "sweep")
    assert command.main([str(tmp_path / "sweep"), f"figure={tmp_path / name}"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / name}: 2 runs\n"
    content = (tmp_path / name).read_bytes()
    assert content.startswith({"speed.pdf": b"%PDF", "speed.svg": b"<?xml", "speed.png": b"\x89PNG"}[name])
    assert name != "speed.svg" or all(word in content.decode() for word in ("Speed-up", "K, drafted", ">a<", ">b<"))
    for other in ("speed.doc", "speed"):
        assert command.main([str(tmp_path / "sweep"), f"figure={tmp_path / other}"]) == 2
        assert "cannot be written: its name must end in .png or .svg or .pdf" in capsys.readouterr().err

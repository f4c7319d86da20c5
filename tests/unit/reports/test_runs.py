"""Finished runs are read back as they were written, and the settings that differ between them are found."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.reports.measures import measure
from llama_ssp.reports.reading import read_settings, to_yaml
from llama_ssp.reports.runs import Run, Setting, find_runs, names_of, read_run, varying_settings
from llama_ssp.reports.tables import runs_table
from tests.helpers import runs as made
from tests.helpers.composed import compose_run
from tests.helpers.runs import FAST, PLAIN, summary, write_run


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", PLAIN, FAST), name="mine")
    assert (run.name, run.status, run.pair, run.num_draft_tokens) == ("mine", "done", "big + small", 2)
    assert run.lines == (PLAIN, FAST)
    assert run.summary == summary(PLAIN, FAST)


def test_a_summary_from_before_the_start_was_timed_is_read(tmp_path: Path) -> None:
    file = write_run(tmp_path / "run", PLAIN, FAST) / "summary.json"
    written = json.loads(file.read_text())
    del written["startup"]
    file.write_text(json.dumps(written))
    assert read_run(tmp_path / "run", name="mine").summary == replace(summary(PLAIN, FAST), startup=None)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", PLAIN)
    with (folder / "run.jsonl").open("ab") as file:
        file.write(FAST.to_json()[:-5])
    assert read_run(folder, name="run").lines == (PLAIN,)


def test_points_of_a_sweep_stand_in_their_order_and_unfinished_ones_are_named(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        write_run(tmp_path / "sweep" / str(number), FAST)
    (tmp_path / "sweep" / "0" / "summary.json").unlink()
    (tmp_path / "sweep" / "0" / "status").write_text("running\n")
    runs, missing = find_runs([tmp_path / "sweep"])
    assert [run.name for run in runs] == ["sweep/2", "sweep/10"]
    assert missing == ["sweep/0 has no summary yet: running"]


def test_a_run_in_two_of_the_folders_is_read_once(tmp_path: Path) -> None:
    for number in range(2):
        write_run(tmp_path / "all" / "sweep" / str(number), FAST)
    (tmp_path / "link").symlink_to(tmp_path / "all" / "sweep")
    runs, missing = find_runs([tmp_path / "all", tmp_path / "all" / "sweep", tmp_path / "link" / "1"])
    assert ([run.name for run in runs], missing) == (["all/sweep/0", "all/sweep/1"], [])


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.yaml", "seed: 7", "seed: [7"),
        ("config.yaml", "seed: 7", "seed: &a [*a]"),
        ("summary.json", "{", "["),
        ("summary.json", '"schema_version": 1', '"schema_version": 99'),
        ("summary.json", '"world_size": 2', '"world_size": "2"'),
        ("summary.json", '"speedup": 2.5', '"speedup": 1e400'),
        ("summary.json", '"placement": {}', f'"placement": {{"a": {"[" * 500}{"]" * 500}}}'),
        ("summary.json", '"accepted_histogram": [', '"accepted_histogram": [], "x": ['),
        ("run.jsonl", '"accepted_lengths": [2, 0, 1]', '"accepted_lengths": [2, 0, -1]'),
    ],
)
def test_a_damaged_run_is_left_out_with_a_sentence_and_others_are_read(
    file: str, old: str, new: str, tmp_path: Path
) -> None:
    for name in ("0", "1"):
        write_run(tmp_path / "s" / name, PLAIN, FAST)
    damaged = tmp_path / "s" / "0" / file
    text = damaged.read_text()
    assert old in text
    damaged.write_text(text.replace(old, new))
    runs, missing = find_runs([tmp_path / "s"])
    assert [run.name for run in runs] == ["s/1"]
    (sentence,) = missing
    assert sentence.startswith(f"{damaged} cannot be read (")
    assert sentence.endswith("): a run of this version is required")
    assert len(sentence) < 1000


@pytest.mark.parametrize("file", ["summary.json", "run.jsonl", "status", "config.yaml"])
def test_what_is_no_file_is_not_waited_for(file: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "s" / "0", PLAIN)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    runs, missing = find_runs([tmp_path / "s"])
    assert ([run.status for run in runs], missing) in (
        ([], [f"{folder / file} cannot be read (it is not a regular file): a run of this version is required"]),
        (["not started"], []),
    )


def test_folders_and_statuses_of_any_name_are_shown_harmlessly(tmp_path: Path) -> None:
    for name in ("²", "\x1b[2J", "\udcff"):
        folder = write_run(tmp_path / "s" / name, PLAIN)
    (folder / "summary.json").unlink()
    (folder / "status").write_bytes(b"2: a\x1b[2J\nb" + b"\xff" * 9999)
    runs, (missing,) = find_runs([tmp_path / "s"])
    assert {run.name for run in runs} == {"s/²", "s/\\x1b[2J"}
    assert missing.startswith("s/\\udcff has no summary yet: 2: a\\x1b[2J b\ufffd")
    assert len(missing) < 5000


BASE = {"sampling.temperature": 0.8, "speculation.num_draft_tokens": 4, "run_dir": "a"}


def run_of(settings: dict[str, object], *, model: str = "big", draft: str | None = "small") -> Run:
    found = summary(PLAIN, FAST, model=model, draft=draft)
    return Run(name="s/0", status="done", summary=found, lines=(PLAIN, FAST), settings=settings)


def varying(*settings: dict[str, object]) -> list[Setting]:
    return varying_settings([run_of(one) for one in settings])


def test_settings_that_differ_are_found_and_the_folder_is_none_and_the_seed_stands_last() -> None:
    base = {"seed": 0} | BASE
    found = varying(base, base | {"sampling.temperature": 0.0, "run_dir": "b"}, base | {"seed": 1})
    assert [(setting.key, setting.name, setting.texts) for setting in found] == [
        ("sampling.temperature", "temperature", ["0.8", "0", "0.8"]),
        ("seed", "seed", ["0", "0", "1"]),
    ]
    runs = [run_of(one) for one in (base, base | {"seed": 1})]
    assert names_of(runs) == (["#", "seed"], [["1", "0"], ["2", "1"]])
    assert varying(BASE, BASE | {"run_dir": "b"}) == []


def test_a_setting_that_only_some_runs_have_differs() -> None:
    (found,) = varying(BASE, BASE | {"task.margin": 0.1})
    assert (found.key, found.texts) == ("task.margin", ["", "0.1"])


def test_names_that_would_be_equal_are_longer() -> None:
    found = varying(
        {"model.dtype": "fp32", "draft.model.dtype": "fp32"}, {"model.dtype": "x", "draft.model.dtype": "y"}
    )
    assert [setting.name for setting in found] == ["model dtype", "draft model dtype"]


def test_values_of_one_kind_are_distinguished() -> None:
    (found,) = varying({"placement.target.ranks": [0, 1]}, {"placement.target.ranks": None})
    assert found.texts == ["[0, 1]", "null"]


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("model", "model=7B draft=tinyllama_1B", "model=13B draft=tinyllama_1B"),
        ("model.quantization", "model=7B draft=tinyllama_1B", "model=7B draft=tinyllama_1B model.quantization=int8"),
        ("draft", "model=tiny draft=tiny-draft", "model=tiny draft=none"),
        ("draft", "model=tiny draft=tiny-draft", "model=tiny draft=tiny-eagle"),
        ("draft", "model=llama3_8B draft=llama3_1B", "model=llama3_8B draft=eagle3_llama3_8B"),
    ],
)
def test_what_follows_from_the_name_of_an_entry_is_left_out(key: str, first: str, second: str) -> None:
    runs = []
    for words in (first, second):
        config, _ = compose_run(*words.split())
        model, draft = (word.partition("=")[2] for word in words.split()[:2])
        runs.append(run_of(read_settings(to_yaml(config)), model=model, draft=draft))
    assert [setting.key for setting in varying_settings(runs)] == [key]


def test_columns_that_no_run_fills_are_left_out() -> None:
    runs = [replace(made.run(PLAIN), status=""), replace(made.run(PLAIN, name="s/1"), status="")]
    table = runs_table(runs)
    assert table.columns == ["#", "plain, ms/token", "prompts", "tokens", "run"]
    assert {len(row) for row in table.rows} == {5}


def test_speedups_are_paired_by_prompt_and_not_by_totals() -> None:
    slow, fast, alone = replace(PLAIN, index=1, ms=1000.0), replace(FAST, index=1, ms=100.0), replace(FAST, index=2)
    measured = measure([PLAIN, FAST, slow, fast, replace(alone, ms=1.0)])
    assert measured.speedup
    assert measured.speedup.value == pytest.approx((2.5 + 10.0) / 2)
    assert (len(measured.pairs), measured.num_faster) == (2, 2)


def test_turns_of_a_conversation_and_samples_of_a_prompt_are_one_prompt() -> None:
    turns = [replace(PLAIN, index=index, turn=index, sample=sample) for index in range(2) for sample in range(3)]
    (mode,) = measure([*turns, replace(PLAIN, index=2, ms=200.0)]).modes.values()
    assert (mode.ms_per_token.value, mode.num_completions) == (15.0, 7), "the median of two prompts"

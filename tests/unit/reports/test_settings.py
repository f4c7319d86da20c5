"""Every setting that differs between runs is found once, under a short name; what follows from a name is left out."""

import pytest

from llama_ssp.reports.reading import read_settings
from llama_ssp.reports.runs import Run, Setting, labels, varying_settings
from llama_ssp.settings.schema import to_yaml
from tests.helpers.composed import compose_run
from tests.helpers.runs import FAST, PLAIN, summary

BASE = {"sampling.temperature": 0.8, "speculation.num_draft_tokens": 4, "run_dir": "a"}


def run_of(settings: dict[str, object], *, model: str = "big", draft: str | None = "small") -> Run:
    found = summary(PLAIN, FAST, model=model, draft=draft)
    return Run(name="s/0", status="done", summary=found, lines=(PLAIN, FAST), settings=settings)


def varying(*settings: dict[str, object]) -> list[Setting]:
    return varying_settings([run_of(each) for each in settings])


def test_settings_that_differ_are_found_and_the_folder_is_none_and_the_seed_stands_last() -> None:
    base = {"seed": 0} | BASE
    found = varying(base, base | {"sampling.temperature": 0.0, "run_dir": "b"}, base | {"seed": 1})
    assert [(each.key, each.name, each.texts) for each in found] == [
        ("sampling.temperature", "temperature", ["0.8", "0", "0.8"]),
        ("seed", "seed", ["0", "0", "1"]),
    ]
    assert labels(found) == ["temperature=0.8, seed=0", "temperature=0, seed=0", "temperature=0.8, seed=1"]
    assert varying(BASE, BASE | {"run_dir": "b"}) == []


def test_a_setting_that_only_some_runs_have_differs() -> None:
    (found,) = varying(BASE, BASE | {"task.margin": 0.1})
    assert (found.key, found.texts) == ("task.margin", ["", "0.1"])


def test_names_that_would_be_equal_are_longer() -> None:
    found = varying(
        {"model.dtype": "fp32", "draft.model.dtype": "fp32"}, {"model.dtype": "x", "draft.model.dtype": "y"}
    )
    assert [each.name for each in found] == ["model dtype", "draft model dtype"]


def test_values_of_one_kind_are_distinguished() -> None:
    (found,) = varying({"placement.target.ranks": [0, 1]}, {"placement.target.ranks": None})
    assert found.texts == ["[0, 1]", "null"]


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("model", "model=7B draft=tinyllama_1B", "model=13B draft=tinyllama_1B"),
        ("model.quantization", "model=7B draft=tinyllama_1B", "model=7B draft=tinyllama_1B model.quantization=int8"),
        ("draft", "model=tiny draft=tiny-draft", "model=tiny draft=ngram"),
    ],
)
def test_what_follows_from_the_name_of_an_entry_is_left_out(key: str, first: str, second: str) -> None:
    runs = []
    for words in (first, second):
        config, _ = compose_run(*words.split())
        model, draft = (word.partition("=")[2] for word in words.split()[:2])
        runs.append(run_of(read_settings(to_yaml(config)), model=model, draft=draft))
    assert [each.key for each in varying_settings(runs)] == [key]

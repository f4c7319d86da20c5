"""Every setting that differs between runs is found once, under a short name; what follows from a name is left out."""

from dataclasses import replace

from llama_ssp.reports.folder import Run
from llama_ssp.reports.reading import read_settings
from llama_ssp.reports.settings import is_number, labels, varying, varying_settings
from llama_ssp.settings.schema import to_yaml
from tests.helpers.composed import compose_run
from tests.helpers.runs import FAST, PLAIN, summary

BASE = {"sampling.temperature": 0.8, "speculation.num_draft_tokens": 4, "seed": 0, "run_dir": "a"}


def run_of(settings: dict[str, object], *, model: str = "big", draft: str | None = "small") -> Run:
    found = summary(PLAIN, FAST, model=model, draft=draft)
    return Run(name="s/0", status="done", summary=found, lines=(PLAIN, FAST), settings=settings)


def composed(*overrides: str) -> dict[str, object]:
    """The settings of a run as its folder holds them."""
    config, _ = compose_run(*overrides)
    return read_settings(to_yaml(config))


def test_settings_that_differ_are_found_and_the_folder_is_none() -> None:
    found = varying([BASE, BASE | {"sampling.temperature": 0.0, "run_dir": "b"}, BASE | {"seed": 1}])
    assert [(each.key, each.name, each.texts, each.is_number) for each in found] == [
        ("sampling.temperature", "temperature", ["0.8", "0", "0.8"], True),
        ("seed", "seed", ["0", "0", "1"], True),
    ]
    assert labels(found) == ["temperature=0.8, seed=0", "temperature=0, seed=0", "temperature=0.8, seed=1"]


def test_equal_runs_have_no_varying_settings() -> None:
    assert varying([BASE, BASE | {"run_dir": "b"}]) == []
    assert varying([BASE]) == []


def test_a_setting_that_only_some_runs_have_differs() -> None:
    (found,) = varying([BASE, BASE | {"task.margin": 0.1}])
    assert (found.key, found.texts, found.is_number) == ("task.margin", ["", "0.1"], False)


def test_names_that_would_be_equal_are_longer() -> None:
    found = varying(
        [{"model.dtype": "fp32", "draft.model.dtype": "fp32"}, {"model.dtype": "x", "draft.model.dtype": "y"}]
    )
    assert [each.name for each in found] == ["model dtype", "draft model dtype"]


def test_values_of_one_kind_are_told_apart_and_others_are_not_numbers() -> None:
    (found,) = varying([{"placement.target.ranks": [0, 1]}, {"placement.target.ranks": None}])
    assert found.texts == ["[0, 1]", "null"]
    assert [is_number(value) for value in (1, 0.5, True, "1", None, float("nan"), 10**400)] == [True, True] + [
        False
    ] * 5


def test_the_figures_of_a_models_entry_follow_from_its_name() -> None:
    runs = []
    for model in ("7B", "13B"):
        config = composed(f"model={model}", "draft=tinyllama_1B")
        runs.append(run_of(config, model=model, draft="tinyllama_1B"))
    assert [each.key for each in varying_settings(runs)] == ["model"]


def test_a_setting_of_the_model_that_is_swept_is_shown() -> None:
    runs = []
    for quantization in ("none", "int8"):
        config = composed("model=7B", "draft=tinyllama_1B", f"model.quantization={quantization}")
        runs.append(run_of(config, model="7B", draft="tinyllama_1B"))
    assert [each.key for each in varying_settings(runs)] == ["model.quantization"]


def test_drafts_of_other_kinds_differ_by_one_column() -> None:
    runs = []
    for draft in ("tiny-draft", "ngram"):
        config = composed("model=tiny", f"draft={draft}")
        runs.append(run_of(config, draft=draft))
    assert [each.key for each in varying_settings(runs)] == ["draft"]


def test_facts_of_the_summary_vary_too() -> None:
    first = run_of(BASE)
    more_ranks = replace(first, summary=replace(first.summary, world_size=4))
    larger = replace(first, summary=replace(first.summary, model="huge"))
    assert [each.key for each in varying_settings([first, more_ranks])] == ["ranks"]
    assert [each.key for each in varying_settings([first, larger])] == ["model"]


def test_the_seed_stands_last() -> None:
    runs = [run_of({"seed": 0, "sampling.top_p": 0.5}), run_of({"seed": 1, "sampling.top_p": 0.9})]
    assert [each.key for each in varying_settings(runs)] == ["sampling.top_p", "seed"]

"""Hydra's view of the config: every option composes, agrees with the catalogue, and becomes dataclasses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.config import catalogue, folders, store
from llama_ssp.config.schema import MODEL_DRAFT, NO_DRAFT, Dtype, ModelConfig, RunConfig
from tests.helpers.lanes import heavy
from tests.unit.config.conftest import Compose

pytestmark = pytest.mark.seconds

OPTIONS = sorted(
    f"{file.parent.name}={file.stem}"
    for file in folders.conf_dir().glob("*/*.yaml")
    if file.parent.name in {*store.BUNDLES, *(field.name for field in dataclasses.fields(RunConfig))}
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("placement=own_gpu", "placement.draft.tp_size=2", "seed=3", r'stop_strings=["\n", "a,b"]'),
        ("draft=none", "draft.model.dtype=bf16", "task=latency", "task.num_warmup=0", "run_dir=null"),
        ("draft.model.dtype=bf16", "sampling=nucleus", "sampling.temperature=0", "timeouts.load_s=1e3", "prompt=a"),
    ],
)
def test_values_set_in_a_copy_are_those_that_hydra_composes(
    overrides: tuple[str, ...], compose_once: Compose, compose_run: Compose
) -> None:
    assert compose_once(*overrides) == compose_run(*overrides)


# Models are composed below too, as targets and as drafts.
@pytest.mark.parametrize("option", [heavy(each) if each.startswith("model=") else each for each in OPTIONS])
def test_every_option_composes(option: str, compose_run: Compose) -> None:
    run, _ = compose_run(option)
    assert isinstance(run, RunConfig)
    assert isinstance(run.model, ModelConfig)


def test_an_experiment_sets_what_was_published_and_the_user_has_the_last_word(compose_run: Compose) -> None:
    run, _ = compose_run("experiment=llama_2023")
    assert (run.task.name, run.sampling.temperature, run.speculation.num_draft_tokens) == ("latency", 0.5, 4)
    given = ("model=30B", "sampling.temperature=0", "timeouts.load_s=9")
    run, _ = compose_run("experiment=llama_2023", "debug=small", *given)
    assert (run.model.name, run.sampling.temperature, run.max_new_tokens) == ("30B", 0, 8)
    assert (run.cuda_graphs, run.timeouts.load_s) == (False, 9)


@pytest.mark.parametrize("name", catalogue.names())
def test_hydra_and_the_catalogue_read_the_same_model(name: str, compose_run: Compose) -> None:
    run, _ = compose_run(f"model={name}", f"draft={name}")
    assert run.model == catalogue.load(name)
    assert run.draft.model == catalogue.load(name)


def test_the_default_draft_is_that_of_the_model(compose_run: Compose) -> None:
    run, _ = compose_run("model=30B")
    assert run.draft.kind == MODEL_DRAFT
    assert run.draft.model == catalogue.load("7B")


def test_settings_of_the_draft_hold_for_a_default_draft(compose_run: Compose) -> None:
    run, _ = compose_run("draft.model.dtype=bf16", "draft.model.path=DIR")
    assert run.draft.model == dataclasses.replace(catalogue.load("tiny-draft"), dtype=Dtype.bf16, path="DIR")


@pytest.mark.parametrize("overrides", [["draft=none"], ["model=llama3_1B"], ["draft=none", "draft.model.dtype=bf16"]])
def test_no_draft_means_no_draft_model(overrides: list[str], compose_run: Compose) -> None:
    run, _ = compose_run(*overrides)
    assert run.draft.kind == NO_DRAFT
    assert run.draft.model is None


def test_escapes_in_stops_are_ends_of_lines_tabs_and_backslashes(compose_run: Compose) -> None:
    run, _ = compose_run(r'stop_strings=["\n\n", "\\n", "a,b\t", def]')
    assert run.stop_strings == ["\n\n", r"\n", "a,b\t", "def"]


def test_two_folders_make_a_pair(compose_run: Compose) -> None:
    run, _ = compose_run("model=local", "model.path=A", "draft=local", "draft.model.path=B", "draft.model.dtype=fp32")
    assert run.draft.model is not None
    assert (run.model.path, run.draft.model.path) == ("A", "B")
    assert (run.model.dtype, run.draft.model.dtype) == (Dtype.auto, Dtype.fp32)


def test_the_files_state_the_defaults_of_the_schema(compose_run: Compose) -> None:
    run, _ = compose_run()
    for field in dataclasses.fields(RunConfig):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING and field.name != "run_dir":
            assert getattr(run, field.name) == default, field.name
    for group in ("placement", "sampling", "verification"):
        assert getattr(run, group) == type(getattr(run, group))(), group


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"RUN_ID": "mine", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "t"}, "mine"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "t"}, "slurm-7"),
        ({"TORCHELASTIC_RUN_ID": "t"}, "t"),
    ],
)
def test_a_run_is_named_by_what_its_ranks_share(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RUN_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert store.run_id.__wrapped__() == name


def test_torchruns_word_for_no_name_is_not_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert store.run_id.__wrapped__().startswith("20")


def test_the_run_folder_is_named_by_the_run(compose_run: Compose) -> None:
    run, _ = compose_run()
    assert run.run_dir is not None
    assert Path(run.run_dir) == Path("outputs") / store.run_id()

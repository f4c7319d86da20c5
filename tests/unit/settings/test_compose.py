"""From words to dataclasses: every option composes, texts arrive as typed, and every mistake gets its sentence."""

import dataclasses
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from llama_ssp import catalogue
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import ConfigError
from llama_ssp.run.tasks.records import CompareConfig
from llama_ssp.settings.compose import Composed, Known, compose, groups_of, run_id
from llama_ssp.settings.schema import MODEL_DRAFT, NO_DRAFT, RunConfig
from llama_ssp.settings.tasks import default_of
from tests.helpers.composed import compose_run
from tests.helpers.lanes import sample
from tests.helpers.own_conf import OwnConf

pytestmark = pytest.mark.seconds

OPTIONS = sorted(
    f"{file.parent.name}={file.stem}"
    for file in catalogue.conf_dir().glob("*/*.yaml")
    if file.parent.name in groups_of()
)
TEXTS = [
    "def factorial(n):",
    "Hello, world",
    "37 * 85 =",
    'it\'s "both" {1: [2]}',
    "${oc.env:HOME} and \\${HOME}",
    "a\nb\\",
    "null",
    "007",
    "",
    *("".join(parts) for parts in product(["\\", "${", "a"], repeat=3)),
]
PATHS = [
    "café.txt",
    "/tmp/ünï cödé",
    "a(1).txt",
    "a=b",
    "a#b",
    "a&b",
    "a!b",
    "a;b",
    "it's",
    "a[1]",
    "2026_11_21",
    "1_000",
    "true",
    "a,b",
    "a b\\",
    "~/a",
]


NOT_PLAIN = r"items that are not plain words, as in stop_strings='\[\"2\.\",\"true\"\]'"


def test_the_catalogue_alone_reads_the_files_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, load = list[str](), OmegaConf.load

    def noted(file: Any) -> Any:
        opened.append(str(getattr(file, "name", file)))
        return load(file)

    monkeypatch.setattr(OmegaConf, "load", noted)
    run, _ = compose_run("model=65B", "draft=7B", "experiment=picture", "hardware=laptop_cpu")
    assert (run.model.shape, run.model.hub_id) == (catalogue.load("65B").shape, catalogue.load("65B").hub_id)
    assert [file for file in opened if str(catalogue.conf_dir()) in file] == []


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("draft=7B", "draft=none"), NO_DRAFT),
        (("draft=none", "draft=7B"), MODEL_DRAFT),
        (("draft=ngram", "draft.model.dtype=bf16", "draft=7B"), MODEL_DRAFT),
    ],
)
def test_the_last_draft_of_several_holds_in_every_call(words: tuple[str, ...], kind: str) -> None:
    known: Known = {}
    first_one, again = (compose(["model=65B", *words], known=known)[0].config for _ in range(2))
    assert first_one == again
    assert first_one.draft.kind == kind
    assert first_one == compose(["model=65B", *words])[0].config


def test_values_of_an_experiment_hold_for_a_draft_that_a_word_names(own_conf: OwnConf) -> None:
    own_conf("experiment/mine.yaml", "# @package _global_\ndraft:\n  model:\n    quantization: int8\n")
    for words in (["draft=7B", "experiment=mine"], ["experiment=mine", "draft=7B"]):
        run, _ = compose_run("model=65B", *words)
        assert run.draft.model
        assert (run.draft.model.name, run.draft.model.quantization) == ("7B", "int8")


def test_blanks_around_the_name_of_an_option_are_no_part_of_it() -> None:
    run, _ = compose_run("model= 7B ")
    assert run.model.name == "7B"


# Models are composed below, as targets and as drafts.
@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.startswith("model=")])
def test_every_option_composes(option: str) -> None:
    run, _ = compose_run(option)
    assert isinstance(run, RunConfig)
    assert isinstance(run.model, ModelConfig)


def test_an_experiment_sets_several_values_and_the_user_has_the_last_word() -> None:
    run, _ = compose_run("experiment=picture", "debug=small", "model=30B", "timeouts.load_s=9")
    assert isinstance(run.task, CompareConfig)
    assert (run.model.name, run.task.picture, run.max_new_tokens) == ("30B", "docs/compare.svg", 8)
    assert (run.cuda_graphs, run.timeouts.load_s) == (False, 9)


@pytest.mark.parametrize("name", sample(catalogue.names("model"), always={*catalogue.names("model")[:6]}, every=3))
def test_hydra_and_the_catalogue_read_the_same_model(name: str) -> None:
    run, _ = compose_run(f"model={name}", f"draft={name}")
    assert run.model == catalogue.load(name)
    assert run.draft.model == catalogue.load(name)


def test_the_default_draft_is_that_of_the_model_with_the_settings_of_the_user() -> None:
    assert compose_run("model=30B")[0].draft.model == catalogue.load("7B")
    run, _ = compose_run("draft.model.dtype=bf16", "draft.model.path=DIR")
    assert run.draft.kind == MODEL_DRAFT
    assert run.draft.model == dataclasses.replace(catalogue.load("tiny-draft"), dtype=Dtype.bf16, path="DIR")


@pytest.mark.parametrize("words", ["draft=none", "model=llama3_1B", "draft=none draft.model.dtype=bf16"])
def test_no_draft_means_no_draft_model(words: str) -> None:
    run, _ = compose_run(*words.split())
    assert (run.draft.kind, run.draft.model) == (NO_DRAFT, None)


def test_the_files_state_the_defaults_of_the_schema() -> None:
    run, _ = compose_run()
    for field in dataclasses.fields(RunConfig):
        default = default_of(run, field.name)
        if default is not dataclasses.MISSING and field.name != "run_dir":
            assert getattr(run, field.name) == default, field.name
    for group in ("placement", "sampling", "verification"):
        assert getattr(run, group) == type(getattr(run, group))(), group


@pytest.mark.parametrize("text", TEXTS)
def test_texts_reach_the_run_as_they_were_typed(text: str) -> None:
    quoted = QuotedString(text=text, quote=Quote.double).with_quotes()
    (composed,) = compose([f"prompt={text}", f"stop_strings=[{quoted}, end]"])
    assert composed.config.prompt == text
    assert list(composed.config.stop_strings) == [text, "end"]
    assert composed.settings == (f"prompt={text}", f"stop_strings=[{quoted}, end]")


@pytest.mark.parametrize("text", ["???", r"\???", r"\\???", "???!"])
def test_a_prompt_of_question_marks_is_a_text(text: str) -> None:
    assert compose_run(f"prompt={text}")[0].prompt == text


def test_escapes_in_stops_are_ends_of_lines_tabs_and_backslashes() -> None:
    run, _ = compose_run(r'stop_strings=["\n\n", "\\n", "a,b\t", def]')
    assert run.stop_strings == ["\n\n", r"\n", "a,b\t", "def"]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_reaches_the_run_as_it_was_typed(path: str) -> None:
    keys = ["run_dir", "prompts", "draft.model.path", "picture"]
    run, explicit = compose_run("draft=local", *(f"{key}={path}" for key in keys))
    assert run.draft.model is not None
    assert {run.run_dir, run.prompts, run.draft.model.path, run.task.picture} == {path}  # type: ignore[attr-defined]
    assert explicit == {"draft", "run_dir", "prompts", "draft.model.path", "task.picture"}


def test_a_path_may_be_quoted_null_or_made_of_others() -> None:
    run, _ = compose_run("prompts='a b'", "model.path=null", "run_dir=${model.name}/a")
    assert (run.prompts, run.model.path, run.run_dir) == ("a b", None, "tiny/a")


def sweep(*words: str) -> list[Composed]:
    return compose(words, multirun=True)


def test_a_sweep_has_a_point_for_each_combination_of_values() -> None:
    points = sweep("model=tiny,'tiny-draft'", "seed=range(1,3)", "prompts=a.txt,b.txt", "prompt=a,b", "draft=none")
    assert [each.settings[:3] for each in points] == [
        (f"model={model}", f"seed={seed}", f"prompts={file}")
        for model, seed, file in product(["tiny", "'tiny-draft'"], [1, 2], ["a.txt", "b.txt"])
    ]
    assert {each.config.prompt for each in points} == {"a,b"}
    assert [each.config.model.name for each in sweep("model=glob(tiny*)")] == [
        "tiny",
        "tiny-draft",
        "tiny-eagle",
        "tinyllama_1B",
    ]
    tasks = [each.config.task.name for each in sweep("task=compare,generate", "seed=1")]
    assert tasks == ["compare", "generate"]


OF_TASKS = {
    "task=generate in_order=true": "task.in_order",
    "in_order=true task=generate": "task.in_order",
    "task=generate generate.in_order=true": "task.in_order",
    "picture=a=b.svg": "task.picture",
    "experiment=picture default_prompts=[a]": "task.default_prompts",
}


@pytest.mark.parametrize(("words", "key"), OF_TASKS.items())
def test_a_setting_of_the_chosen_task_needs_no_prefix(words: str, key: str) -> None:
    assert key in compose_run(*words.split())[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=llama3_80B"], r"unknown model 'llama3_80B': there are 13B, .*; did you mean llama3_8B"),
        (["model=7b"], r"unknown model '7b': there are .*; did you mean 7B\?"),
        (["draft=tiny_draft"], r"unknown draft 'tiny_draft': .*\bnone\b.*; did you mean tiny-draft\?"),
        (["draft=nextn"], r"draft=nextn is draft=mtp here: give that"),
        (["task=comprae"], r"unknown task 'comprae': there are .*compare.*generate.*; did you mean compare\?"),
        (["hardware=laptop"], r"unknown hardware 'laptop': there are .*; did you mean laptop_cpu\?"),
        (["hardware=acme/box"], "unknown hardware 'acme/box'"),
        (["placement=pipeline"], r"unknown placement 'pipeline': there are accelerate, auto, .*, tensor"),
        (["verification=couple"], r"unknown verification 'couple': there are block, coupled, greedy, speculative"),
        (["experiment=../task/compare"], r"unknown experiment '../task/compare': there are .*picture"),
        (["experiment=null"], r"unknown experiment 'null'"),
        (["draft.model.pth=DIR"], r"unknown setting 'draft.model.pth': did you mean draft.model.path"),
        (["xyzzy=1"], r"unknown setting 'xyzzy': --help all lists all settings"),
        (["sampling.no_repeat_ngram_size=3"], r"is not supported; sampling.repetition_penalty=1.1 or"),
        (["draft.kind=none"], r"unknown setting 'draft.kind'"),
        (["model.shape.vocab_size=3"], r"unknown setting 'model.shape.vocab_size'"),
        (["task.name=compare"], r"unknown setting 'task.name'"),
        (["task=compare", "name=x"], r"unknown setting 'name'"),
        (["task=generate", "in_orde=true"], r"unknown setting 'in_orde': did you mean"),
        (["num_draft_tokens=2"], r"unknown setting 'num_draft_tokens': did you mean speculation.num_draft_tokens\?"),
        (["generate.in_order=true"], r"generate.in_order has no effect here: it is a setting of task=generate"),
        (["task.format=jsonl"], r"task.format has no effect here: it is a setting of task=generate"),
        (["experiment=picture", "task.in_order=true"], r"it is a setting of task=generate"),
        (["task=generate", "task.default_prompts=[a]"], r"of .*task=compare"),
        (["draft=ngram", "draft.model.dtype=bf16"], r"draft.model.dtype has no effect without a draft model: give one"),
        (["+extra=1"], r"\+extra=1: all settings exist already"),
        (["~draft"], r"~draft: all settings exist already"),
        (["model@draft.model=13B"], r"model@draft.model=13B: all settings exist already"),
        (["task=generate", "format=a,b"], r"format=a,b gives several values: add -m"),
        (["hydra/launcher=basic"], r"hydra/launcher is for sweeps: add -m"),
        (["model._target_=os.system"], r"_target_ is refused"),
        (["hydra.launcher._target_=os.system"], r"_target_ is refused"),
        (["+hydra.callbacks.a={_target_:os.system}"], r"_target_ is refused"),
        (["no setting"], r"cannot read 'no setting': settings are written name=value"),
        (["stop_strings=self"], r"stop_strings=self: a list is written \[a,b\]"),
        *(([f"stop_strings=[a,{value}]"], NOT_PLAIN) for value in ["2.", "true", "null", "[a]", "{a:1}", "1e3"]),
    ],
)
def test_a_mistake_gets_its_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        compose(words)
    assert "\n" not in str(caught.value)


def test_all_mistakes_come_in_one_error() -> None:
    with pytest.raises(ConfigError, match=re.escape("4 problems in the configuration:")):
        compose(["model=8B", "temperature=3", "~seed", "batch_size=few"])
    with pytest.raises(ConfigError, match=r"^unknown model '8B'"):
        sweep("model=7B,8B")


def test_an_option_that_a_file_names_and_that_does_not_exist_gets_the_similar_one(own_conf: OwnConf) -> None:
    own_conf("experiment/mine.yaml", "# @package _global_\ndefaults:\n  - override /model: tyni\n")
    with pytest.raises(ConfigError, match=r"In '\S+': unknown model 'tyni': there are 13B, .*; did you mean tiny"):
        compose(["experiment=mine"])


def test_a_run_and_its_folder_are_named_by_what_its_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose_run()[0].run_dir == f"outputs/{run_id()}"
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # in `srun --pty bash` each command is a run of its own
    given = {"RUN_ID": "mine", "TORCHELASTIC_RUN_ID": "t"}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    for variable, name in zip(given, ("mine", "t"), strict=True):
        assert run_id.__wrapped__() == name
        monkeypatch.delenv(variable)
    assert re.fullmatch(r"20\d\d-.*", run_id.__wrapped__())


def test_a_folder_as_a_model_is_short_for_local_and_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("acme/model", "acme/empty", "a b, it's"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "acme/model/config.json").touch()
    paths = (str(tmp_path), "./acme/empty", "~/acme", "acme/", ".", "acme/model", "./a b, it's")
    for path in paths:
        config, explicit = compose_run(f"model={path}", f"draft={path}")
        draft = config.draft.model
        assert draft
        assert [(each.name, each.path, each.hub_id) for each in (config.model, draft)] == [("local", path, None)] * 2
        assert {"model", "model.path", "draft", "draft.model.path"} <= explicit
    config, _ = compose_run("model='~/acme'", "model.dtype=bf16", "draft=none")
    assert (config.model.path, config.model.dtype) == ("~/acme", Dtype.bf16)
    assert compose_run("model=acme/empty", "draft=none")[0].model.hub_id == "acme/empty"


def test_a_folder_as_a_model_is_swept_and_recorded_with_its_full_settings(tmp_path: Path) -> None:
    words = [f"model={tmp_path},7B", "draft=none"]
    folder, name = compose(words, multirun=True)
    assert folder.settings == ("model=local", f"model.path={tmp_path}", "draft=none")
    assert name.settings == ("model=7B", "draft=none")
    assert compose([f"model={tmp_path}"], root="plan")[0].config.model.path == str(tmp_path)


def test_an_entry_of_the_catalogue_wins_over_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_conf: OwnConf
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("7B", "acme/mine", "mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    own_conf("model/acme/mine.yaml", "name: acme/mine\nhub_id: acme/other\n")
    assert compose_run("model=7B")[0].model.name == "7B"
    assert compose_run("model=acme/mine", "draft=none")[0].model.hub_id == "acme/other"
    with pytest.raises(ConfigError, match=r"model=mine is a folder here: give model=\./mine"):
        compose_run("model=mine")

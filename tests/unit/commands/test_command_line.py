"""What the user typed: literal prompts, unknown names, and errors of Hydra in one sentence."""

import re
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from llama_ssp.commands import command_line
from llama_ssp.config import folders, store
from llama_ssp.errors import ConfigError

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
]


@pytest.mark.parametrize("text", TEXTS + ["".join(parts) for parts in product(["\\", "'", "${", "}", "a"], repeat=3)])
def test_a_prompt_reaches_the_run_as_it_was_typed(text: str) -> None:
    override = OverridesParser.create().parse_override(command_line.take_literally(f"prompt={text}"))
    assert OmegaConf.create({"prompt": override.value()}).prompt == text
    in_a_sweep = OverridesParser.create().parse_override(f"prompt={override.get_value_element_as_str()}")
    assert OmegaConf.create({"prompt": in_a_sweep.value()}).prompt == text


@pytest.mark.parametrize("text", [text for text in TEXTS if text] + ["${", "a,b", "[c]", "2."])
def test_stops_reach_the_run_as_hydra_reads_them(text: str) -> None:
    given = QuotedString(text=text, quote=Quote.double).with_quotes()
    literal = command_line.take_literally(f"stop_strings=[{given}, end]")
    assert command_line.take_literally(literal) == literal, "a submitted job takes it literally once more"
    override = OverridesParser.create().parse_override(literal)
    wanted = [text.replace("\\${", "${"), "end"]
    assert OmegaConf.to_object(OmegaConf.create({"stops": override.value()})) == {"stops": wanted}


@pytest.mark.parametrize("value", ["2.", "true", "null", "[a]", "{a:1}", "1e3"])
def test_a_stop_that_would_become_a_value_is_to_be_quoted(value: str) -> None:
    with pytest.raises(ConfigError, match=r"items that are not plain words, as in stop_strings='\[\"2\.\",\"true\"\]'"):
        command_line.check_overrides([command_line.take_literally(f"stop_strings=[a,{value}]")], multirun=False)
    command_line.check_overrides([command_line.take_literally(f'stop_strings=[a,"{value}"]')], multirun=False)


PATHS = [
    "café.txt", "/tmp/ünï cödé", "a(1).txt", "a=b", "a#b", "a&b", "a!b", "a;b", "it's", "a[1]", "2026_11_21", "1_000",
    "true", "a,b", "a b\\", "~/a",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["run_dir", "prompts", "draft.model.path", "task.output", "figure"])
def test_a_path_reaches_the_run_as_it_was_typed(key: str, path: str) -> None:
    override = OverridesParser.create().parse_override(command_line.take_literally(f"{key}={path}"))
    assert OmegaConf.to_object(OmegaConf.create({"path": override.value()})) == {"path": path}


@pytest.mark.parametrize("value", ["", "null", "'a b'", '"a b"', "${oc.env:HOME}/a"])
def test_a_path_may_be_quoted_null_or_made_of_others(value: str) -> None:
    assert command_line.take_literally(f"run_dir={value}") == f"run_dir={value}"


def test_only_texts_and_paths_are_literal() -> None:
    assert command_line.take_literally("model=7B,13B") == "model=7B,13B"
    assert command_line.take_literally("prompts=a.txt,b.txt", multirun=True) == "prompts=a.txt,b.txt"
    assert command_line.take_literally("prompt=a,b", multirun=True) == "prompt='a,b'"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model=llama3_80B"], r"unknown model 'llama3_80B': there are 13B, .*; did you mean llama3_8B"),
        (["model=tyni"], r"unknown model 'tyni': there are .*; did you mean tiny\?"),
        (["model=7b"], r"unknown model '7b': there are .*; did you mean 7B\?"),
        (["draft=nnoe"], r"unknown draft 'nnoe': there are .*; did you mean none\?"),
        (["hardware=8xh020"], r"unknown hardware '8xh020': there are .*; did you mean 8xh200\?"),
        (["draft=tiny_draft"], r"unknown draft 'tiny_draft': .*\bnone\b.*; did you mean tiny-draft\?"),
        (["task=comprae"], r"unknown task 'comprae': there are benchmark, .*, latency; did you mean compare\?"),
        (["hardware=laptop"], r"unknown hardware 'laptop': there are .*; did you mean laptop_cpu\?"),
        (["placement=pipeline"], r"unknown placement 'pipeline': there are accelerate, auto, .*, tensor"),
        (["sampling=gredy"], r"unknown sampling 'gredy': there are default, greedy, nucleus; did you mean greedy\?"),
        (["verification=couple"], r"unknown verification 'couple': there are block, coupled, greedy, speculative"),
        (["modell=7B"], r"unknown setting 'modell': did you mean model\?"),
        (["temperature=0.5"], r"unknown setting 'temperature': did you mean sampling.temperature\?"),
        (["sampling.temprature=1"], r"unknown setting 'sampling.temprature': did you mean sampling.temperature\?"),
        (["draft.model.pth=DIR"], r"unknown setting 'draft.model.pth': did you mean draft.model.path"),
        (["xyzzy=1"], r"unknown setting 'xyzzy': --help all lists all settings"),
        (["+extra=1"], r"\+extra=1: all settings exist already"),
        (["~draft"], r"~draft: all settings exist already"),
        (["model@draft.model=13B"], r"model@draft.model=13B: all settings exist already"),
        (["sampling.no_repeat_ngram_size=3"], r"is not supported; sampling.repetition_penalty=1.1 or"),
        (["draft.kind=none"], r"unknown setting 'draft.kind'"),
        (["model.shape.vocab_size=3"], r"unknown setting 'model.shape.vocab_size'"),
        (["task.name=latency"], r"unknown setting 'task.name'"),
        (["task.format=jsonl"], r"task.format has no effect here: it is a setting of task=generate"),
        (
            ["task=generate", "task.default_prompts=[a]"],
            r"a setting of task=benchmark and task=compare and task=evaluate and task=latency",
        ),
        (["model=7B,13B"], r"model=7B,13B gives several values: add -m"),
        (["model._target_=os.system"], r"_target_ is refused"),
        (["hydra.launcher._target_=os.system"], r"_target_ is refused"),
        (["+hydra.callbacks.a={_target_:os.system}"], r"_target_ is refused"),
        (["experiment=../task/compare"], r"unknown experiment '../task/compare': there are llama_2023, picture"),
        (["experiment=picture", "task.num_warmup=2"], r"it is a setting of task=latency"),
        (["no setting"], r"cannot read 'no setting': settings are written name=value"),
        (["prompts=a(b)"], r"cannot read 'prompts=a\(b\)'"),
    ],
)
def test_a_name_that_does_not_exist_gets_its_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        command_line.check_overrides(overrides, multirun=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "multirun"),
    [
        (["model=30B", "draft=7B", "draft.model.dtype=fp16"], False),
        (["task=generate", "task.format=jsonl"], False),
        (["experiment=llama_2023", "task.num_warmup=2", "debug=small"], False),
        (["task=compare,generate", "task.format=text", "model=7B,'13B'"], True),
        (["model=glob(llama2*)"], True),
        (["speculation.num_draft_tokens=range(1,5)"], True),
        (["prompt='_target_'", "hydra.verbose=true"], False),
    ],
)
def test_names_that_exist_pass(overrides: list[str], multirun: bool) -> None:
    command_line.check_overrides(overrides, multirun=multirun)


def test_a_sweep_with_one_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown model '8B'"):
        command_line.check_overrides(["model=7B,8B"], multirun=True)


def test_all_unknown_names_come_in_one_error() -> None:
    with pytest.raises(ConfigError, match=re.escape("3 problems in the configuration:")):
        command_line.check_overrides(["model=8B", "temperature=3", "~seed"], multirun=False)


def test_an_unknown_option_teaches_the_syntax() -> None:
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --model: settings are written name=value"):
        command_line.read_options(["--model", "7B"])


def test_explicit_keys_are_groups_and_dotted_keys() -> None:
    keys = command_line.explicit_keys(["model=7B", "sampling.temperature=0", "prompt='a=b'"])
    assert keys == {"model", "sampling.temperature", "prompt"}


def test_an_error_and_its_cause_become_one_sentence() -> None:
    error = ConfigCompositionException("Error merging override seed=abc")
    error.__cause__ = ValueError("Value 'abc' of type 'str' could not be converted to Integer\n    full_key: seed")
    assert command_line.one_sentence(error) == "seed=abc: Value 'abc' of type 'str' could not be converted to Integer"


def test_an_option_that_a_file_names_and_that_does_not_exist_gets_the_similar_one(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /model: tyni\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    store.register()
    with initialize_config_dir(str(folders.conf_dir()), version_base="1.3"):
        words = ["experiment=mine", f"hydra.searchpath=[file://{tmp_path}]"]
        with pytest.raises(MissingConfigException) as caught:
            compose("config", words)
    sentence = command_line.one_sentence(caught.value)
    assert re.fullmatch(r"In '\S+': unknown model 'tyni': there are 13B, .*; did you mean tiny\?", sentence)

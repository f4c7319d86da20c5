"""`task=evaluate`: what its settings must be, what suites fill in and do not read, and what others say of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.ranks.process import signals_kept
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.runs import varying_settings
from llama_ssp.run.commands import program
from llama_ssp.run.prompts import read_prompts
from llama_ssp.settings import checks
from llama_ssp.settings.compose import compose
from tests.helpers import runs
from tests.helpers.composed import check_refused, compose_run
from tests.helpers.in_process import call

BAD = {
    "task=evaluate suite=agreements": "unknown suite 'agreements': there are agreement, arithmetic, distribution; did",
    "task=evaluate sampling=greedy": "at temperature 0 all samples of a prompt are equal: use suite=agreement",
    "task=evaluate num_samples=2": "num_samples=2 is too few for suite=distribution: give at least 20",
    "task=evaluate suite=agreement task.margin=0.2": "task.margin has no effect on suite=agreement",
    "task=evaluate suite=arithmetic task.near_tie=0": "task.near_tie has no effect on suite=arithmetic",
    "task=evaluate suite=arithmetic prompt=a": "prompt has no effect on suite=arithmetic, which makes its own",
    "task=evaluate suite=arithmetic num_samples=2": "num_samples has no effect on suite=arithmetic, which co",
    "task=evaluate suite=arithmetic num_prompts=8101": "num_prompts=8101 is more than the 8100 products of two",
    "task=evaluate suite=arithmetic task.margin=1": "task.margin=1.0 must be a difference of two rates",
    "task=evaluate suite=agreement task.near_tie=-1": "task.near_tie=-1.0 must be 0 or more nats",
    "task=evaluate suite=agreement sampling.temperature=1": "suite=agreement compares greedy text, and sampling.temp",
    "task=evaluate prompts=-": "prompts=- has no effect on task=evaluate",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("task=evaluate gat=true", "unknown setting 'gat': did you mean"),
        ("task=compare suite=agreement", "suite has no effect here: it is a setting of task=evaluate"),
        ("task=generate task.default_prompts=[a]", "task=compare and task=evaluate"),
        ("eval 13B", "'eval 13B' names no settings: write task=evaluate suite=arithmetic model=13B"),
    ],
)
def test_a_mistake_is_answered_with_what_there_is(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose(words.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "13B"], "'eval' is no command: write llama-ssp run task=evaluate suite=arithmetic model=13B"),
        (["run", "--help", "exit"], "1 a rank was lost, an audit found a fault, an evaluation with gate=true failed,"),
    ],
)
def test_the_program_names_it_where_it_is_asked_for_and_where_it_fails(words: list[str], sentence: str) -> None:
    with signals_kept():
        ended = call(program.main, words)
    assert sentence in ended.out + ended.err


def test_a_verdict_may_be_found_anew_with_other_limits_and_of_no_other_suite(tmp_path: Path) -> None:
    def open_with(**task: object) -> None:
        lines = [f"  {key}: {value}" for key, value in {"name": "evaluate", "suite": "agreement", **task}.items()]
        RunFolder(tmp_path, "\n".join(["task:", *lines, ""])).close()

    open_with(gate="false", margin=0.1, near_tie="null")
    open_with(gate="true", margin=0.2, near_tie=1.0)
    with pytest.raises(ConfigError, match=r'\(task.suite was "agreement" and is now "arithmetic"\)'):
        open_with(suite="arithmetic")


def test_a_report_with_runs_of_other_tasks_shows_which_suite_judged() -> None:
    settings = [{"task": "evaluate", "task.suite": suite} for suite in ("agreement", "arithmetic")]
    found = [replace(runs.run(runs.PLAIN), settings=one) for one in (*settings, {"task": "compare"})]
    shown = {setting.key: setting.values for setting in varying_settings(found)}
    assert shown["task.suite"] == ("agreement", "arithmetic", "")


def test_a_setting_may_have_the_name_of_the_task_as_its_prefix() -> None:
    assert "task.gate" in compose_run("task=evaluate", "evaluate.gate=true")[1]


EVALUATE = "task=evaluate"


FILLED = {"distribution": (48, 500, [], 0.8), "arithmetic": (8, 1, ["\n"], 0.8), "agreement": (64, 1, [], 0.0)}


@pytest.mark.seconds
@pytest.mark.parametrize(("suite", "wanted"), FILLED.items())
def test_a_suite_fills_in_what_was_left_out_and_takes_every_rule(suite: str, wanted: tuple[object, ...]) -> None:
    for rule in ("speculative", "block", "coupled"):
        config, explicit = compose_run(EVALUATE, f"task.suite={suite}", f"verification={rule}")
        assert (config.max_new_tokens, config.num_samples, config.stop_strings, config.sampling.temperature) == wanted
        checks.check(config, explicit, world_size=1)


@pytest.mark.seconds
def test_what_the_user_or_a_bundle_has_set_stays() -> None:
    config, _ = compose_run(EVALUATE, "num_samples=30", "max_new_tokens=64")
    assert (config.num_samples, config.max_new_tokens) == (30, 64)
    assert compose_run(EVALUATE, "task.suite=agreement", "sampling=nucleus")[0].sampling.temperature == 0.8
    assert compose_run(EVALUATE, "task.suite=arithmetic", "experiment=llama_2023")[0].sampling.temperature == 0.5


def test_the_prompts_are_those_of_the_suite_or_the_users() -> None:
    def texts(*words: str) -> list[str]:
        return [prompt.text for prompt in read_prompts(compose_run(EVALUATE, *words)[0])]

    assert [text.count("\n") for text in texts("task.suite=arithmetic", "num_prompts=5")] == [3] * 5
    assert "def factorial(n):\n    " in texts()
    assert texts("prompt=import") == ["import"]


SWEPT = ("num_samples=20", "prompt=import", "task.near_tie=0.01")


@pytest.mark.parametrize(
    ("suite", "unread", "left"),
    [
        ("distribution", ["task.near_tie"], (20, "import")),
        ("agreement", ["num_samples"], (1, "import")),
        ("arithmetic", ["task.near_tie", "prompt", "num_samples"], (1, None)),
    ],
)
def test_at_a_point_of_a_sweep_what_its_suite_cannot_use_is_a_warning(
    suite: str, unread: list[str], left: tuple[int, str | None]
) -> None:
    composed, explicit = compose_run(EVALUATE, f"task.suite={suite}", *SWEPT)
    config, found = checks.check(composed, explicit, world_size=1, of_sweep=True)
    assert (composed.num_samples, composed.prompt) == (20, "import"), "what was composed stays"
    assert {each.key for each in found} == set(unread)
    assert any(str(each).startswith(f"{unread[0]} has no effect on suite={suite}") for each in found)
    assert (config.num_samples, config.prompt) == left
    assert [prompt.text.count("*") for prompt in read_prompts(config)] == ([4] * 1000 if suite == "arithmetic" else [0])

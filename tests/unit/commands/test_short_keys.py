"""Settings of the chosen task without `task.`, or after the task's name."""

import re

import pytest

from llama_ssp.commands import command_line
from llama_ssp.commands.short_keys import ShortKeys
from llama_ssp.errors import ConfigError


def complete(*words: str) -> list[str]:
    return [*map(ShortKeys(words).complete, words)]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["task=latency", "num_warmup=2"], "task.num_warmup=2"),
        (["num_warmup=2", "task=latency"], None),
        (["task=evaluate", "evaluate.gate=true"], "task.gate=true"),
        (["task=evaluate", "suite=arithmetic,agreement"], "task.suite=arithmetic,agreement"),
        (["task=evaluate,latency", "num_warmup=2"], "task.num_warmup=2"),
        (["picture=a=b.svg"], "task.picture=a=b.svg"),
        (["compare.picture=a.svg"], "task.picture=a.svg"),
        (["experiment=llama_2023", "num_warmup=0"], "task.num_warmup=0"),
        (["task=benchmark", "num_draft_tokens=[2,4]"], "task.num_draft_tokens=[2,4]"),
        (["prompt='task=latency", "task=generate", "format=jsonl"], "task.format=jsonl"),
    ],
)
def test_a_key_of_the_chosen_task_is_completed(words: list[str], wanted: str | None) -> None:
    completed = complete(*words)
    assert (completed[-1] == wanted) if wanted else (completed[0] == "task.num_warmup=2")


@pytest.mark.parametrize(
    "words",
    [
        ["seed=3"], ["model=7B"], ["task=latency"], ["task.picture=a.svg"], ["sampling.temperature=0"], ["picture"],
        ["task=latency", "name=compare"], ["task=latency", "latency.name=compare"], ["+picture=a"], ["~picture"],
        ["task=evaluate", "latency.num_warmup=2"], ["task=latency", "gate=true"], ["pictur=a"], ["-m"],
        ["--config-dir=picture"], ["task=calibrate", "run_dir=a"], ["task=nonsense", "gate=true"],
    ],
)  # fmt: skip
def test_everything_else_stays_as_it_is(words: list[str]) -> None:
    assert complete(*words) == words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["num_warmup=2"], "num_warmup has no effect here: it is a setting of task=latency"),
        (["latency.num_warmup=2"], "latency.num_warmup has no effect here: it is a setting of task=latency"),
        (["task=evaluate", "format=jsonl"], "format has no effect here: it is a setting of task=generate"),
        (["task=evaluate", "gat=true"], "unknown setting 'gat': did you mean"),
        (["task=evaluate", "evaluate.gat=true"], "unknown setting 'evaluate.gat': did you mean task.gate?"),
        (["num_draft_tokens=2"], "unknown setting 'num_draft_tokens': did you mean speculation.num_draft_tokens?"),
        (["temperature=1"], "unknown setting 'temperature': did you mean sampling.temperature?"),
        (["task=evaluate", "suite=a,b"], "task.suite=a,b gives several values: add -m"),
        (["task=evaluate", "name=x"], "unknown setting 'name'"),
    ],
)
def test_a_wrong_key_gets_the_sentence_that_it_deserves(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        command_line.check_overrides(complete(*words), multirun=False)


def test_a_path_of_a_task_is_taken_literally_after_a_short_key() -> None:
    (word,) = complete("picture=a(1).svg")
    assert command_line.take_literally(word) == "task.picture='a(1).svg'"

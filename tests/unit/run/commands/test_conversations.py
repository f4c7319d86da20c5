"""Questions of several turns: each turn follows the answers to those before it, of its own mode and sample."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.settings import catalogue
from llama_ssp.weights import hub
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy, slow

pytestmark = pytest.mark.seconds

QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "code", "turns": ["import os", "def f(x):", "class A"]},
    {"question_id": 82, "category": "math", "turns": ["3 * 5 ="]},
    {"question_id": 83, "category": "code", "turns": ["def read(self):", "def write(self):"]},
]
TURNS = [(question, number) for question in QUESTIONS for number in range(len(question["turns"]))]
GENERATE = ("task=generate", "max_new_tokens=6", "device=cpu")
Line = dict[str, Any]


def ask(folder: Path, *settings: str, name: str = "run", questions: list[dict[str, Any]] = QUESTIONS) -> Ended:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return launch(*settings, f"prompts={file}", f"run_dir={folder / name}")


def ids(found: list[Line], sample: int | None = None) -> dict[tuple[int, str, int], list[int]]:
    return {
        (line["index"], line["mode"], line["sample"]): line["token_ids"]
        for line in found
        if sample in {None, line["sample"]}
    }


@pytest.mark.parametrize(
    "settings",
    [
        ("model=tiny-draft", "draft=none", "batch_size=4", "num_samples=2"),
        heavy(("draft=tiny-draft", "batch_size=4", "num_samples=2")),
        slow(("draft=tiny-draft", "batch_size=1", "num_samples=2")),
    ],
)
def test_a_later_turn_has_the_text_of_the_whole_conversation_as_one_prompt_and_is_recorded_with_its_question(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Prompts of the same place and sample have the same random numbers."""
    found = ask(tmp_path, *GENERATE, *settings).lines
    assert len(found) == len(TURNS) * 2
    for sample in (0, 1):
        mine = sorted((line for line in found if line["sample"] == sample), key=lambda line: line["index"])
        for line, (question, number) in zip(mine, TURNS, strict=True):
            assert (line["prompt"], line["turn"]) == (question["turns"][number], number)
            assert (line["question_id"], line["category"]) == (str(question["question_id"]), question["category"])
        said = [f"{line['prompt']}{line['text']}\n" for line in mine]
        alone = [{"prompt": "".join(said[i - mine[i]["turn"] : i]) + mine[i]["prompt"]} for i in range(len(mine))]
        wanted = ask(tmp_path, *GENERATE, *settings, name=f"alone{sample}", questions=alone).lines
        assert ids(found, sample) == ids(wanted, sample)


@pytest.mark.heavy
def test_in_a_chat_the_turns_and_answers_are_messages(tmp_path: Path) -> None:
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "model")
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (folder / "chat_template.jinja").write_text(template)
    words = (*GENERATE, "model=local", f"model.path={folder}", "draft=none", "batch_size=4")
    found = sorted(ask(tmp_path, *words, "chat=true").lines, key=lambda line: line["index"])
    said = [f"user: {line['prompt']}\nassistant: " for line in found]
    texts = [f"{prompt}{line['text']}\n" for prompt, line in zip(said, found, strict=True)]
    alone = [
        {"prompt": "".join(texts[line["index"] - line["turn"] : line["index"]]) + said[line["index"]]} for line in found
    ]
    assert ids(found) == ids(ask(tmp_path, *words, name="alone", questions=alone).lines)


@pytest.mark.parametrize(
    ("num_kept", "settings"),
    [
        heavy(1, ("task=generate", "model=tiny-draft", "draft=none", "batch_size=2", "num_samples=2")),
        slow(4, ("task=compare", "batch_size=1")),
        slow(1, ("task=latency", "batch_size=3")),
    ],
)
def test_a_resumed_conversation_goes_on_after_its_recorded_answers_and_refuses_other_questions(
    num_kept: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*settings, "max_new_tokens=6", "device=cpu")
    whole = ask(tmp_path, *words).lines
    file = tmp_path / "run" / "run.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:num_kept]))
    resumed = ask(tmp_path, *words).lines
    assert len(resumed) == len(whole)
    assert ids(resumed) == ids(whole)
    apart = [{"prompt": turn} for question in QUESTIONS for turn in question["turns"]]
    ended = ask(tmp_path, *words, questions=apart)
    assert (ended.code, "prompt 2 of prompts=" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("max_new_tokens=1000", "max_new_tokens=1000 for each of 3 answers that is more than the context of 2048"),
        heavy("task=benchmark", "task=benchmark takes prompts of one turn"),
    ],
)
def test_a_conversation_that_cannot_work_is_refused_before_anything_is_loaded(
    setting: str, sentence: str, tmp_path: Path
) -> None:
    ended = ask(tmp_path, "task=generate", setting, "device=cpu")
    assert ended.code == 2
    assert sentence in ended.err
    assert "loading" not in ended.err


@pytest.mark.heavy
def test_a_dry_run_counts_the_answers_before_a_turn(tmp_path: Path) -> None:
    long = ask(tmp_path, "task=generate", "max_new_tokens=500", "dry_run=true", "device=cpu", questions=QUESTIONS[:1])
    assert (long.code, "batch 1, 1009 + 500 tokens" in long.out) == (0, True)

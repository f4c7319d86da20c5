"""Questions of several turns: each turn follows the answers to those before it, of its own mode and sample."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.settings import catalogue
from llama_ssp.weights import hub
from tests.helpers.disturbed import lines as recorded
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


def ask(folder: Path, *settings: str, name: str = "run", questions: list[dict[str, Any]] | None = None) -> Ended:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions or QUESTIONS))
    return launch(*settings, f"prompts={file}", f"run_dir={folder / name}")


def lines(folder: Path, name: str = "run") -> list[Line]:
    return recorded(folder / name)


def ids(found: list[Line]) -> dict[tuple[int, str, int], list[int]]:
    return {(line["index"], line["mode"], line["sample"]): line["token_ids"] for line in found}


def conversation(found: list[Line], last: Line) -> str:
    """A later turn as one prompt: what was asked and answered before it, as it was recorded."""
    before = {line["index"]: line for line in found if (line["mode"], line["sample"]) == (last["mode"], last["sample"])}
    earlier = [before[index] for index in range(last["index"] - last["turn"], last["index"])]
    return "".join(f"{line['prompt']}{line['text']}\n" for line in earlier) + str(last["prompt"])


@pytest.mark.parametrize(
    "settings",
    [
        ("model=tiny-draft", "draft=none", "batch_size=4", "num_samples=2"),
        heavy(("draft=tiny-draft", "batch_size=4", "num_samples=2")),
        slow(("draft=tiny-draft", "batch_size=1", "num_samples=2")),
    ],
)
def test_a_later_turn_has_the_text_of_the_whole_conversation_as_one_prompt(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Prompts of the same place and sample have the same random numbers."""
    assert ask(tmp_path, *GENERATE, *settings).code == 0
    found = lines(tmp_path)
    assert len(found) == len(TURNS) * (2 if "num_samples=2" in settings else 1)
    for sample in {line["sample"] for line in found}:
        mine = sorted((line for line in found if line["sample"] == sample), key=lambda line: line["index"])
        alone = [{"prompt": conversation(found, line)} for line in mine]
        assert ask(tmp_path, *GENERATE, *settings, name=f"alone{sample}", questions=alone).code == 0
        wanted = ids(lines(tmp_path, f"alone{sample}"))
        assert {key: value for key, value in ids(found).items() if key[2] == sample} == {
            key: value for key, value in wanted.items() if key[2] == sample
        }


@pytest.mark.heavy
def test_in_a_chat_the_turns_and_answers_are_messages(tmp_path: Path) -> None:
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "model")
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (folder / "chat_template.jinja").write_text(template)
    words = (*GENERATE, "model=local", f"model.path={folder}", "draft=none", "batch_size=4")
    assert ask(tmp_path, *words, "chat=true").code == 0
    found = sorted(lines(tmp_path), key=lambda line: line["index"])
    said = [f"user: {line['prompt']}\nassistant: " for line in found]
    texts = [f"{prompt}{line['text']}\n" for prompt, line in zip(said, found, strict=True)]
    alone = [
        {"prompt": "".join(texts[line["index"] - line["turn"] : line["index"]]) + said[line["index"]]} for line in found
    ]
    assert ask(tmp_path, *words, name="alone", questions=alone).code == 0
    assert ids(found) == ids(lines(tmp_path, "alone"))


@pytest.mark.heavy
def test_every_turn_is_recorded_with_its_question(tmp_path: Path) -> None:
    assert ask(tmp_path, *GENERATE, "draft=none", "model=tiny-draft", "batch_size=2").code == 0
    found = sorted(lines(tmp_path), key=lambda line: line["index"])
    for line, (question, number) in zip(found, TURNS, strict=True):
        assert line["prompt"] == question["turns"][number]
        assert (line["turn"], line["category"]) == (number, question["category"])
        assert line["question_id"] == str(question["question_id"])


@pytest.mark.parametrize(
    ("num_kept", "settings"),
    [
        heavy(1, ("task=generate", "model=tiny-draft", "draft=none", "batch_size=2", "num_samples=2")),
        slow(4, ("task=compare", "batch_size=1")),
        slow(1, ("task=latency", "batch_size=3")),
    ],
)
def test_a_resumed_conversation_goes_on_after_its_recorded_answers(
    num_kept: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*settings, "max_new_tokens=6", "device=cpu")
    assert ask(tmp_path, *words).code == 0
    whole = lines(tmp_path)
    file = tmp_path / "run" / "run.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:num_kept]))
    assert ask(tmp_path, *words).code == 0
    resumed = lines(tmp_path)
    assert len(resumed) == len(whole)
    assert ids(resumed) == ids(whole)


@pytest.mark.heavy
def test_questions_that_have_changed_are_refused(tmp_path: Path) -> None:
    words = (*GENERATE, "model=tiny-draft", "draft=none")
    assert ask(tmp_path, *words).code == 0
    apart = [{"prompt": turn} for question in QUESTIONS for turn in question["turns"]]
    ended = ask(tmp_path, *words, questions=apart)
    assert ended.code == 2
    assert "prompt 2 of prompts=" in ended.err


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
    words = ("task=generate", "max_new_tokens=500", "dry_run=true", "device=cpu")
    short = ask(tmp_path, *words, questions=[{"prompt": "import os def f(x): class A"}])
    long = ask(tmp_path, *words, questions=QUESTIONS[:1])
    assert (short.code, long.code) == (0, 0)
    assert "batch 1, 10 + 500 tokens" in short.out
    assert "batch 1, 1009 + 500 tokens" in long.out

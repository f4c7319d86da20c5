"""Questions of several turns: each turn follows the answers to those before it, of its own mode and sample."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy, slow

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
    ("setting", "code", "said"),
    [
        ("max_new_tokens=1000", 2, "max_new_tokens=1000 for each of 3 answers that is more than the context of 2048"),
        heavy("task=benchmark", 2, "task=benchmark takes prompts of one turn"),
        heavy("max_new_tokens=500 dry_run=true", 0, "batch 1, 1009 + 500 tokens"),
    ],
)
def test_the_answers_before_a_turn_count_before_anything_is_loaded(
    setting: str, code: int, said: str, tmp_path: Path
) -> None:
    ended = ask(tmp_path, "task=generate", *setting.split(), "device=cpu")
    assert ended.code == code
    assert said in ended.out + ended.err
    assert "loading" not in ended.err

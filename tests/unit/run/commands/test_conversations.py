"""Questions of several turns, and chats: templates, messages, and prompts that are too long for the context."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.run import chat
from llama_ssp.run.commands import agent, own_ranks
from tests.helpers.hub import shipped
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


@pytest.mark.seconds
@pytest.mark.parametrize(
    "settings",
    [
        ("model=tiny-draft", "draft=none", "batch_size=4", "num_samples=2"),
        slow(("draft=tiny-draft", "batch_size=4", "num_samples=2")),
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
    ask(tmp_path, *words, questions=apart).check_refusal("prompt 2 of prompts=")


@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ("max_new_tokens=1000", 2, "max_new_tokens=1000 for each of 3 answers that is more than the context of 2048"),
        heavy("max_new_tokens=500 dry_run=true", 0, "batch 1, 1010 + 500 tokens"),
    ],
)
def test_the_answers_before_a_turn_count_before_anything_is_loaded(
    setting: str, code: int, said: str, tmp_path: Path
) -> None:
    ended = ask(tmp_path, "task=generate", *setting.split(), "device=cpu")
    assert ended.code == code
    assert said in ended.out + ended.err
    assert "loading" not in ended.err


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} <no thoughts>{% endif %}"
)
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SMALL = ("task=generate", "draft=none", "max_new_tokens=2", "device=cpu", "format=jsonl")
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(shipped("tiny-draft"), tmp_path / "model")


def ask_of_chats(folder: Path, *settings: str, template: str = TEMPLATE, **record: object) -> Ended:
    (folder / "chat_template.jinja").write_text(template)
    file = folder / "p.jsonl"
    file.write_text(json.dumps(record or {"messages": [USER]}))
    number = len([*folder.glob("run*")])
    return launch(*SMALL, f"model={folder}", f"prompts={file}", f"run_dir={folder}/run{number}", *settings)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (FOREVER, "takes more than 0.5 s or"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", "takes more than 0.5 s or"),
        ("{% set n = namespace(x='abcd' * 999) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MiB"),
        ("{{ 9 ** 9 ** 9 }}", "computes a power"),
        ("{{ 'a' * 2000 }}", "writes 2000 characters"),
        ("{{ '\\ud800' }}", "writes '\\ud800', a lone surrogate"),
        ("{{ '\ud800' }}".encode("utf-8", "surrogatepass").decode("latin-1"), None),
    ],
    ids=["silent", "loud", "doubled", "power", "long", "surrogate", "latin"],
)
def test_a_template_without_an_end_or_with_half_a_character_is_a_sentence(
    template: str, fault: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MOST_S", 0.5)
    monkeypatch.setattr(chat, "MOST_BYTES", 1 << 28)
    monkeypatch.setattr(chat, "MOST_CHARS", 1000)
    ended = ask_of_chats(folder, template=template)
    if fault is None:
        ended.well()
    else:
        ended.check_refusal(f"the chat template in {folder} ", fault)


def test_a_refused_system_message_and_what_is_no_text_are_named(folder: Path) -> None:
    ended = ask_of_chats(folder, messages=[{"role": "system", "content": "Be brief."}, USER])
    ended.check_refusal("refuses the messages that end with 'Hi' (System role not supported): if it takes no system")
    assert "copy tokenizer_config.json" not in ended.err
    for message, said in (
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, "has image_url in message 1"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "has tool calls in message 1"),
    ):
        ask_of_chats(folder, messages=[message, USER]).check_refusal(said)


@pytest.mark.heavy
def test_parts_of_text_are_joined_and_arguments_reach_the_template(folder: Path) -> None:
    parts: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    whole = json.loads(ask_of_chats(folder).out)
    assert json.loads(ask_of_chats(folder, messages=[parts]).out)["token_ids"] == whole["token_ids"]
    silent, same = (
        json.loads(ask_of_chats(folder, words).out)
        for words in ("chat_arguments={enable_thinking: false}", "chat_arguments.enable_thinking=false")
    )
    assert silent["token_ids"] == same["token_ids"]
    pair = load(folder)
    (found,) = pair.generate([parts], max_new_tokens=2, chat_arguments={"enable_thinking": False})
    assert str(pair.tokenizer.decode(found.prompt_ids)).endswith("assistant: <no thoughts>")
    assert found.token_ids == silent["token_ids"]
    with pytest.raises(ConfigError, match="prompt 1 has image in message 1"):
        pair.generate([parts | {"content": [{"type": "image"}]}])
    for name, template in (("enable_thoughts", TEMPLATE), ("tokenize", TEMPLATE + "{# tokenize #}")):
        ended = ask_of_chats(folder, f"chat_arguments={{{name}: false}}", template=template)
        ended.check_refusal(f"chat_arguments.{name} has no effect: the chat template in")


def test_the_library_says_so_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_S", 0.5)
    (folder / "chat_template.jinja").write_text(FOREVER)
    with pytest.raises(CheckpointError, match=r"takes more than 0\.5 s"):
        load(folder).generate("Hi", chat=True)


LONG = "def f(x):\n" * 900


@pytest.mark.heavy
def test_a_prompt_that_is_too_long_is_named_by_line_and_id_before_a_rank_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "p.jsonl"
    texts = ["import os", LONG, "class", LONG + "a"]
    file.write_text("".join(json.dumps({"id": f"q{n}", "prompt": text}) + "\n" for n, text in enumerate(texts)))
    monkeypatch.setattr(agent, "run_ranks", lambda *_a, **_o: pytest.fail("ranks have started"))
    words = [*SMALL, f"model={folder}", f"prompts={file}"]
    assert own_ranks.main([*words, "ranks=2", f"run_dir={folder}/run"], num_ranks=None) == 2
    said = capsys.readouterr().err
    assert f"line 2 of prompts={file} (q1): prompt 'def f(x):\\ndef" in said
    assert "tokens, and with max_new_tokens=2 that is more than the context of 2048" in said
    assert "too_long=skip leaves it out, and too_long=truncate keeps its end" in said
    assert f"; too long as well: line 4 of prompts={file} (q3)" in said

    ended = launch(*words, "too_long=skip", f"run_dir={folder}/skipped")
    assert (ended.code, sorted(line["index"] for line in ended.lines)) == (0, [0, 2])
    assert f"too long for the context, and left out: line 2 of prompts={file} (q1): prompt 'def" in ended.err
    ended = launch(*words, "too_long=truncate", "sampling=greedy", f"run_dir={folder}/cut")
    assert (ended.code, sorted(line["index"] for line in ended.lines)) == (0, [0, 1, 2, 3])
    ids = load(folder).tokenizer(texts[3]).input_ids
    (found,) = load(folder).generate([ids[-2046:]], max_new_tokens=2, temperature=0)
    assert found.token_ids == next(line["token_ids"] for line in ended.lines if line["index"] == 3)
    file.write_text(json.dumps({"prompt": LONG}))
    launch(*words, "too_long=skip", f"run_dir={folder}/none").check_refusal(
        "too long for the context, and left out: line 1"
    )


CHAT: list[dict[str, str]] = [
    USER | {"name": "Ann"},
    {"role": "assistant", "content": "Yes?", "reasoning_content": "A greeting."},
    USER | {"name": "Bob"},
]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("number", "change"),
    [
        (0, {"name": "Eve"}),
        (1, {"reasoning_content": "A call."}),
        (1, {"content": "No?"}),
        (2, {"name": "Eve"}),
        (2, {"role": "assistant"}),
    ],
)
def test_a_resumed_chat_has_all_that_its_template_reads(number: int, change: dict[str, str], folder: Path) -> None:
    same = f"run_dir={folder}/chat"
    before = ask_of_chats(folder, same, messages=CHAT).well().lines
    assert ask_of_chats(folder, same, messages=CHAT).well().lines == before
    changed = [message | (change if place == number else {}) for place, message in enumerate(CHAT)]
    ask_of_chats(folder, same, messages=changed).check_refusal("prompt 1 of prompts=", *change.values())
    (line,) = before
    assert line.pop("last_message") == {"role": "user", "name": "Bob"}
    (folder / "chat/run.jsonl").write_text(json.dumps(line) + "\n")
    ask_of_chats(folder, same, messages=CHAT).well()  # an earlier version wrote no last message


@pytest.mark.seconds
def test_a_text_that_becomes_a_message_is_another_prompt(folder: Path) -> None:
    same = f"run_dir={folder}/chat"
    ask_of_chats(folder, same, prompt=USER["content"]).well()
    ask_of_chats(folder, same, messages=[USER]).check_refusal("prompt 1 of prompts=", "was 'Hi' when")

"""Chats: what a chat template may do, what a message may hold, and prompts that are too long for the context."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import catalogue, load
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.run import chat
from llama_ssp.run.commands import agent, own_ranks
from llama_ssp.weights import hub
from tests.helpers.in_process import Ended, launch

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
    return shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "model")


def ask(folder: Path, *settings: str, template: str = TEMPLATE, **record: object) -> Ended:
    (folder / "chat_template.jinja").write_text(template)
    file = folder / "p.jsonl"
    file.write_text(json.dumps(record or {"messages": [USER]}))
    number = len([*folder.glob("run*")])
    return launch(*SMALL, f"model={folder}", f"prompts={file}", f"run_dir={folder}/run{number}", *settings)


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
    ended = ask(folder, template=template)
    if fault is None:
        assert ended.code == 0, ended.err
        return
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert f"the chat template in {folder} " in ended.err
    assert fault in ended.err


def test_a_refused_system_message_and_what_is_no_text_are_named(folder: Path) -> None:
    ended = ask(folder, messages=[{"role": "system", "content": "Be brief."}, USER])
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert "refuses the messages that end with 'Hi' (System role not supported): if it takes no system" in ended.err
    assert "copy tokenizer_config.json" not in ended.err
    for message, said in (
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, "has image_url in message 1"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "has tool calls in message 1"),
    ):
        ended = ask(folder, messages=[message, USER])
        assert (ended.code, said in ended.err) == (2, True), ended.err


def test_parts_of_text_are_joined_and_arguments_reach_the_template(folder: Path) -> None:
    parts: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    whole = json.loads(ask(folder).out)
    assert json.loads(ask(folder, messages=[parts]).out)["token_ids"] == whole["token_ids"]
    silent = json.loads(ask(folder, "chat_arguments={enable_thinking: false}").out)
    assert silent["token_ids"] == json.loads(ask(folder, "chat_arguments.enable_thinking=false").out)["token_ids"]
    pair = load(folder)
    (found,) = pair.generate([parts], max_new_tokens=2, chat_arguments={"enable_thinking": False})
    assert str(pair.tokenizer.decode(found.prompt_ids)).endswith("assistant: <no thoughts>")
    assert found.token_ids == silent["token_ids"]
    with pytest.raises(ConfigError, match="prompt 1 has image in message 1"):
        pair.generate([parts | {"content": [{"type": "image"}]}])
    ended = ask(folder, "chat_arguments={enable_thoughts: false}")
    assert (ended.code, "chat_arguments.enable_thoughts has no effect: the chat template in" in ended.err) == (2, True)
    ended = ask(folder, "chat_arguments={tokenize: false}", template=TEMPLATE + "{# tokenize #}")
    assert (ended.code, "chat_arguments.tokenize has no effect" in ended.err) == (2, True)


def test_the_library_says_so_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_S", 0.5)
    (folder / "chat_template.jinja").write_text(FOREVER)
    with pytest.raises(CheckpointError, match=r"takes more than 0\.5 s"):
        load(folder).generate("Hi", chat=True)


LONG = "def f(x):\n" * 900


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
    ended = launch(*words, "too_long=skip", f"run_dir={folder}/none")
    assert (ended.code, "too long for the context, and left out: line 1" in ended.err) == (2, True)

"""Thoughts of models: read before the text and its calls, whole and streamed, and counted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from transformers import AddedToken

from llama_ssp import Pair, load
from llama_ssp.extensions.serve.inbox import Part, ServedRequest
from llama_ssp.extensions.serve.protocol import Answer, Asked, BodyReader
from llama_ssp.extensions.serve.responses import Response, as_chat
from llama_ssp.extensions.serve.thoughts import ThoughtReader, Thoughts, thoughts_of
from llama_ssp.speculate.engine.text import StopStrings
from tests.extensions.serve.answers import CASES, KINDS, WEATHER, Kind, Read, is_read_at_every_cut, offered
from tests.helpers.extensions import need

QWEN, QWQ = KINDS["Qwen 3"], KINDS["QwQ"]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}


def asked_of(pair: Pair, **more: Any) -> Asked:
    reader = BodyReader(pair.config, pair.models.request_maker, length=512, eos_ids=pair.models.eos_ids)
    return reader.read(BODY | more, is_chat=True)


def thoughts_to(pair: Pair, **more: Any) -> Thoughts | None:
    """The thoughts that the answer to a body may begin with."""
    found = asked_of(pair, **more).answers[0]._thinker
    return None if found is None else Thoughts(found._mark, found._ends[0], found._is_within, {})


@pytest.mark.parametrize("case", list(CASES))
def test_thoughts_are_read_first_whole_and_cut_at_every_character(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    kind, text, wanted = CASES[case]
    monkeypatch.setattr(pair.tokenizer, "chat_template", kind.template)
    thoughts = thoughts_to(pair, tools=[WEATHER])
    assert thoughts
    assert is_read_at_every_cut(text, wanted, thoughts, offered(pair.tokenizer))


def pieces_of(pair: Pair, answer: Answer, text: str, *, step: int = 1) -> Iterator[str]:
    """Push a text, and yield the new text of each part."""
    ids = pair.tokenizer(text, add_special_tokens=False).input_ids
    for place in range(0, len(ids), step):
        yield answer.push(Part(ids[place : place + step]))
    yield answer.push(Part(finish_reason="stop"))


def answered(pair: Pair, asked: Asked, text: str) -> Answer:
    """The whole answer with a text."""
    [answer] = asked.answers
    assert [*pieces_of(pair, answer, text)]
    return answer


@pytest.mark.parametrize("step", [1, 3, 99])
@pytest.mark.parametrize("case", list(CASES))
def test_an_answer_has_its_thoughts_in_a_field_and_so_have_the_events_of_its_stream(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, case: str, step: int
) -> None:
    kind, text, (thoughts, content, num_calls) = CASES[case]
    monkeypatch.setattr(pair.tokenizer, "chat_template", kind.template)
    asked = asked_of(pair, tools=[WEATHER])
    [answer] = asked.answers
    deltas = [answer.choice(piece)["delta"] for piece in pieces_of(pair, answer, text, step=step)]
    whole: Any = answer.choice()
    message = whole["message"]
    assert (message.get("reasoning_content", ""), message["content"] or "") == (thoughts, content)
    assert (len(message.get("tool_calls", ())), whole["finish_reason"]) == (
        num_calls,
        "tool_calls" if num_calls else "stop",
    )
    streamed: Any = deltas
    assert "".join(delta.get("reasoning_content", "") for delta in streamed) == thoughts
    assert "".join(delta["content"] or "" for delta in streamed) == content
    assert sum(len(delta.get("tool_calls", ())) for delta in streamed) == num_calls


@pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
@pytest.mark.parametrize("stops", [[], ["never in this text"]])
def test_tokens_of_thoughts_are_counted_up_to_their_last_mark(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: Kind, stops: list[str]
) -> None:
    monkeypatch.setattr(pair.tokenizer, "chat_template", kind.template)
    thought = f"{kind.begins}one two three{kind.ends.rstrip()}"
    ids = [pair.tokenizer(text, add_special_tokens=False).input_ids for text in (thought, "x\ny is the text")]
    asked = asked_of(pair)
    request = ServedRequest(
        index=0,
        prompt_ids=asked.completions[0].prompt_ids,
        max_new_tokens=99,
        stops=StopStrings(pair.tokenizer, stops) if stops else None,
    )
    form = thoughts_of(pair.tokenizer, None, request.prompt_ids)
    asked.answers[:] = [Answer(request, pair.tokenizer, 0, is_chat=True, thoughts=form)]
    whole = [*ids[0], *ids[1]]
    for place in range(0, len(whole), 7):
        asked.answers[0].push(Part(whole[place : place + 7]))
    asked.answers[0].push(Part(finish_reason="length"))
    counted: Any = asked.usage()["completion_tokens_details"]
    assert counted["reasoning_tokens"] == len(ids[0])
    assert asked.answers[0].text == "x\ny is the text"


def test_only_templates_that_know_thoughts_have_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for source, wanted in (
        (template, None),
        ("{# </think> #}" + template, False),
        ("{# [/THINK] #}" + template, False),
        (QWQ.template, True),
        (template + "<think>\n\n</think>\n\n", False),
    ):
        monkeypatch.setattr(pair.tokenizer, "chat_template", source)
        found = thoughts_to(pair)
        assert (found and found.is_open) == wanted, source


@pytest.mark.parametrize("kind", [QWEN, QWQ], ids=["Qwen 3", "QwQ"])
def test_a_text_of_a_structure_has_no_thoughts(pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """And calls that must be made neither; calls that may be made follow thoughts."""
    need("grammars")
    monkeypatch.setattr(pair.tokenizer, "chat_template", kind.template)
    for more in ({"guided_regex": "<think>a</think>b"}, {"tools": [WEATHER], "tool_choice": "required"}):
        asked = asked_of(pair, **more)
        answer = answered(pair, asked, "<think>a</think>b")
        assert (answer.text, answer.thoughts, answer.num_thought) == ("<think>a</think>b", "", 0)
    assert thoughts_to(pair, tools=[STRICT])
    assert thoughts_to(pair, response_format={"type": "text"})
    monkeypatch.setattr(pair.tokenizer, "chat_template", KINDS["Llama 3"].template)
    assert not thoughts_to(pair, tools=[STRICT])


def test_a_restricted_call_begins_at_the_first_mark_as_its_grammar_has_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("grammars")
    monkeypatch.setattr(pair.tokenizer, "chat_template", QWEN.template)
    for lead, thoughts in (("<think>so</think>", "so"), ("<think>so ", "so")):
        answer = answered(pair, asked_of(pair, tools=[STRICT]), f"{lead}{QWEN.called}")
        assert (answer.thoughts, answer.text, len(answer.calls)) == (thoughts, "", 1)


@pytest.mark.seconds
def test_marks_of_thoughts_that_are_special_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [AddedToken(text, special=True) for text in ("[THINK]", "[/THINK]", "[TOOL_CALLS]")]
    kind = KINDS["Magistral"]
    with load("tiny") as pair:
        pair.tokenizer.add_special_tokens({"additional_special_tokens": marks})
        for template, begins in ((kind.template, "[THINK]"), (kind.template + "[THINK]", "")):
            monkeypatch.setattr(pair.tokenizer, "chat_template", template)
            text = f"{begins}May I {kind.called}?[/THINK]{kind.called}"
            answer = answered(pair, asked_of(pair, tools=[WEATHER]), text)
            assert (answer.thoughts.replace(" ", ""), len(answer.calls)) == (
                f"May I {kind.called}?".replace(" ", ""),
                1,
            )
            assert answer.text.strip() == ""


def response_to(pair: Pair, text: str, *, streams: bool) -> tuple[Any, list[Any]]:
    """The response with a text, and its events."""
    body: dict[str, Any] = {"input": "x", "tools": [{"type": "function", **WEATHER["function"]}]}
    reader = BodyReader(pair.config, pair.models.request_maker, length=512, eos_ids=pair.models.eos_ids)
    asked = reader.read(as_chat(body), is_chat=True)
    response, [answer] = Response(asked, body), asked.answers

    async def pieces() -> AsyncIterator[tuple[Answer, str]]:
        for piece in pieces_of(pair, answer, text):
            yield answer, piece

    async def stream() -> list[Any]:
        return [json.loads(event.decode().partition("data: ")[2]) async for event in response.events(pieces())]

    if not streams:
        answered(pair, asked, text)
        return response.whole(), []
    events = asyncio.run(stream())
    return events[-1]["response"], events


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_a_response_has_reasoning_as_an_item(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, case: str, streams: bool
) -> None:
    kind, text, (thoughts, content, num_calls) = CASES[case]
    monkeypatch.setattr(pair.tokenizer, "chat_template", kind.template)
    whole, events = response_to(pair, text, streams=streams)
    kinds = ["reasoning"] * bool(thoughts) + ["message"] * bool(content) + ["function_call"] * num_calls
    assert [item["type"] for item in whole["output"]] == kinds
    texts = {item["type"]: item["content"][0]["text"] for item in whole["output"] if "content" in item}
    assert texts == ({"reasoning": thoughts} if thoughts else {}) | ({"message": content} if content else {})
    num_thought = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert (num_thought > 0) == bool(thoughts or kind.ends in text)
    if streams:
        check_events(events, whole["output"])


def check_events(events: list[Any], output: list[Any]) -> None:
    """Each item is added, written and done before the next one begins; the openai package knows its events."""
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    reader: Any = TypeAdapter(ResponseStreamEvent)
    assert all(reader.validate_python(event).type == event["type"] for event in events if "output_index" in event)
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[-1]["item"] == item
        if item["type"] == "reasoning":
            written = [event["delta"] for event in own if event["type"] == "response.reasoning_text.delta"]
            [done] = [event["text"] for event in own if event["type"] == "response.reasoning_text.done"]
            assert "".join(written) == done == item["content"][0]["text"]
    starts = [event["output_index"] for event in events if "output_index" in event]
    assert starts == sorted(starts)


def test_the_texts_are_of_four_kinds() -> None:
    wanted: list[Read] = [read for _, _, read in CASES.values()]
    assert (len(wanted), len(KINDS)) == (24, 4)
    assert ThoughtReader(Thoughts("<think>", "</think>", is_open=False, marks={})).push("  <th", is_over=True) == (
        "",
        "  <th",
    )

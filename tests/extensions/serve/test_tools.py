"""Tools of chats: offered to the template, called in its form, and answered in OpenAI's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AddedToken

from llama_ssp import Pair, load
from llama_ssp.extensions.serve.inbox import Part, RequestError, ServedRequest
from llama_ssp.extensions.serve.protocol import Answer, BodyReader
from llama_ssp.extensions.serve.tools import CallReader, MarkedText, tools_of
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.speculate.engine.masks import forbidden
from tests.extensions.serve.server import Server, serving
from tests.helpers.extensions import need
from tests.helpers.lanes import first, grid

TEMPLATES = {
    "hermes": 'call: <tool_call>{\\"name\\": N, \\"arguments\\": A}</tool_call>',
    "llama": 'Environment: ipython; call: {"name": N, "parameters": A}',
    "mistral": '[TOOL_CALLS][{"name": N, "arguments": A}]',
    "apriel": 'in <tool_call></tool_call>: <tool_calls>[{\\"name\\": N, \\"arguments\\": A}]</tool_calls>',
}
"""What each teaches its model."""
BODY = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"leaf": {"$ref": "#/$defs/leaf"}},
    "required": ["leaf"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "integer", "minimum": 0, "maximum": 9}},
}


def function(name: str, schema: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema or CITY} | more}


WEATHER, GROW = function("weather"), function("grow-tree", TREE)
CALLS = {
    "hermes": ["<tool_call>\n{call}\n</tool_call>", "\n<tool_call>{call}</tool_call>\n"],
    "llama": ["{call}", "; {call}"],
    "mistral": ["[TOOL_CALLS][{call}", ", {call}]"],
    "apriel": ["<tool_calls>[{call}", ", {call}]</tool_calls>"],
}


def template_of(form: str) -> str:
    return "{# " + TEMPLATES[form] + " #}" + BODY


def written(form: str, name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "parameters" if form == "llama" else "arguments": arguments}, ensure_ascii=False)


@pytest.fixture(scope="module")
def served() -> Pair:
    return load("tiny", "tiny-draft")


@pytest.fixture(scope="module")
def server(served: Pair) -> Iterator[Server]:
    with serving(served) as server:
        yield server


@pytest.fixture(params=list(TEMPLATES))
def form(request: pytest.FixtureRequest, served: Pair, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of(request.param))
    return str(request.param)


def answer_to(pair: Pair, text: str, *, asked: dict[str, Any], step: int = 0, reason: str = "eos") -> tuple[Any, Any]:
    """The whole message of an answer with this text, and that of its stream, `step` tokens at a time, put together."""
    ids = pair.tokenizer(text, add_special_tokens=False).input_ids
    tools = tools_of(asked, pair.tokenizer)
    request = ServedRequest(index=0, prompt_ids=(80,), max_new_tokens=len(ids))
    answer = Answer(request, pair.tokenizer, 0, is_chat=True, tools=tools)
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    choices: list[Any] = []
    step = step or len(ids)
    for place in range(0, len(ids), step):
        is_last = place + step >= len(ids)
        piece = answer.push(Part(ids[place : place + step], reason if is_last else None))
        choices.append(answer.choice(piece))
        delta = choices[-1]["delta"]
        message["content"] += delta["content"] or ""
        for call in delta.get("tool_calls", ()):
            assert call["index"] == len(message["tool_calls"])
            message["tool_calls"].append({name: value for name, value in call.items() if name != "index"})
    whole: Any = answer.choice()
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole["finish_reason"]]
    streamed = {"content": message["content"] or None} if message["tool_calls"] else {"content": message["content"]}
    return whole, streamed | ({"tool_calls": message["tool_calls"]} if message["tool_calls"] else {})


@pytest.mark.parametrize("step", [0, 1, 3])
def test_calls_in_an_answer_are_read_whole_and_streamed(served: Pair, form: str, step: int) -> None:
    texts = [written(form, "weather", city='Köln "</tool_call>"'), written(form, "grow-tree", leaf=3)]
    text = "".join(part.replace("{call}", call) for part, call in zip(CALLS[form], texts, strict=True))
    lead = "" if form == "llama" else "Let me see.\n\n"
    whole, streamed = answer_to(served, lead + text, asked={"tools": [WEATHER, GROW]}, step=step)
    message = whole["message"]
    assert whole["finish_reason"] == "tool_calls"
    assert message.get("content") == (lead.strip() or None)
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert found == [("weather", {"city": 'Köln "</tool_call>"'}), ("grow-tree", {"leaf": 3})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in message["tool_calls"])
    assert streamed == {name: value for name, value in message.items() if name != "role"}


TEXTS = {
    "no call": "The weather is fine, {really}.",
    "half a mark": "<tool_",
    "not JSON": "<tool_call>{name: weather}</tool_call>",
    "an unknown tool": '<tool_call>{"name": "other", "arguments": {}}</tool_call> so',
    "no arguments": '{"name": "weather"}',
    "no object": "[TOOL_CALLS][1, 2]",
    "a list": "[1] and {",
    "arguments that are a list": '{"name": "weather", "parameters": [1]}',
    "white space": " \n",
    "a number that JSON lacks": '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
    "more": '{"a": 1} then',
}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("text", list(TEXTS))
def test_what_is_no_call_is_text(served: Pair, text: str, step: int) -> None:
    whole, streamed = answer_to(served, TEXTS[text], asked={"tools": [WEATHER]}, step=step)
    plain, _ = answer_to(served, TEXTS[text], asked={}, step=step)
    assert whole["message"]["content"] == streamed["content"] == plain["message"]["content"]
    assert (whole["finish_reason"], "tool_calls" in whole["message"]) == ("stop", False)


@pytest.mark.parametrize("step", [0, 1])
def test_a_call_that_is_cut_is_text_and_those_before_it_are_calls(served: Pair, form: str, step: int) -> None:
    texts = [written(form, "weather", city=city) for city in ("Bonn", "Rom")]
    text = "".join(part.replace("{call}", call) for part, call in zip(CALLS[form], texts, strict=True))
    for word, number in (("Bonn", 0), ("Rom", 1)):
        whole, streamed = answer_to(
            served, text[: text.index(word)], asked={"tools": [WEATHER]}, reason="length", step=step
        )
        assert whole["finish_reason"] == "length"
        assert whole["message"]["content"].endswith(texts[number].partition(word)[0])
        assert len(whole["message"].get("tool_calls", ())) == len(streamed.get("tool_calls", ())) == number


@pytest.mark.seconds
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("choice", first(["required", "named", "single"]))
@pytest.mark.parametrize("temperature", first([0, 1]))
def test_the_openai_package_gets_the_calls_that_it_asks_for(server: Server, choice: str, temperature: float) -> None:
    import openai  # all workers would, and it takes a second

    name: Any = {"type": "function", "function": {"name": "grow-tree"}}
    more: dict[str, Any] = {"single": {"parallel_tool_calls": False}}.get(choice, {})
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [WEATHER, GROW],
        "seed": 1,
        "temperature": temperature,
        "tool_choice": name if choice == "named" else "required",
        "max_tokens": 120,
        **more,
    }
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        [whole] = client.chat.completions.create(**asked).choices
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        if whole.finish_reason != "length":
            with client.chat.completions.stream(**asked) as stream:
                assert [*stream]
                put_together = stream.get_final_completion().choices[0].message.tool_calls
            assert functions_of(put_together) == functions_of(whole.message.tool_calls)
    calls = functions_of(whole.message.tool_calls)
    assert functions_of([call for chunk in chunks for call in chunk.delta.tool_calls or ()]) == calls
    assert chunks[-1].finish_reason == whole.finish_reason
    if whole.finish_reason != "length":
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert (len(calls) >= 1) if choice == "required" else (len(calls) == 1)
    for name_of, arguments in calls:
        if name_of == "weather":
            assert choice != "named"
            assert json.loads(arguments) in [{"city": "Rom"}, {"city": "Bonn"}]
        else:
            assert (name_of, [*json.loads(arguments)]) == ("grow-tree", ["leaf"])


@pytest.mark.seconds
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("streams", [False, True])
def test_responses_call_tools_and_go_on_with_their_outputs(server: Server, streams: bool) -> None:
    need("grammars")
    import openai  # all workers would, and it takes a second

    asked: dict[str, Any] = {"model": "tiny", "seed": 1, "temperature": 0.5, "tool_choice": "required"}
    flat = [{"type": "function", **WEATHER["function"]}]
    turns = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "id": "rs"},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rom"}', "id": "fc"},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": '{"city": "Bonn"}', "id": "fd"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        for name, city in (("a", "Rom"), ("b", "Bonn"))
    ]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
    ]
    more = {"temperature": 0.5, "metadata": {"a": "b"}, "max_output_tokens": 90, "top_p": 0.9, "truncation": "auto"}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        create: Any = client.responses.create
        given = {"input": turns, "tools": flat, **asked, **more, "include": ["reasoning.encrypted_content"]}
        given |= {"extra_body": {"seed": given.pop("seed")}}
        if streams:
            events = [*create(**given, stream=True)]
            done = [event for event in events if event.type == "response.function_call_arguments.done"]
            written_ = "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta")
            assert written_ == "".join(event.arguments for event in done)
            found = events[-1].response
            assert [one.item_id for one in done] == [item.id for item in found.output if item.type == "function_call"]
        else:
            found = create(**given)
        tools = {"tools": [WEATHER], "max_tokens": 90, "top_p": 0.9}
        wanted = server.ask("/v1/chat/completions", asked | tools | {"messages": messages})[1]["choices"][0]["message"]
    made = [(item.name, item.arguments) for item in found.output if item.type == "function_call"]
    assert made == [(one["function"]["name"], one["function"]["arguments"]) for one in wanted["tool_calls"]]
    assert {name: getattr(found, name) for name in more} == more
    assert (found.tool_choice, found.tools[0].name, found.instructions) == ("required", "weather", None)


@pytest.mark.seconds
def test_responses_have_log_probabilities_if_they_are_to_be_included(server: Server) -> None:
    body = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server.session.models.tokenizer, "chat_template", BODY)
        _, answer = server.ask("/v1/responses", body | {"ignore_eos": True})
    [part] = answer["output"][0]["content"]
    assert [len(token["top_logprobs"]) for token in part["logprobs"]] == [2] * 5
    assert "".join(token["token"] for token in part["logprobs"]) == part["text"]


def functions_of(calls: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls or ()]


def reader_of(pair: Pair) -> BodyReader:
    return BodyReader(pair.config, pair.models.request_maker, length=512, eos_ids=pair.models.eos_ids)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


@pytest.mark.usefixtures("form")
def test_the_template_gets_tools_and_their_answers(served: Pair) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
    ]
    asked = {**CHAT, "messages": messages, "tools": [WEATHER, GROW]}
    expected = "{}user: x assistant: weatherRom tool: rain "
    for choice, lead in (("auto", "weather grow-tree "), ("none", "")):
        [request] = reader_of(served).read({**asked, "tool_choice": choice}, is_chat=True).completions
        found = str(served.tokenizer.decode([*request.prompt_ids]))
        assert found.replace("\n", " ") == expected.format(lead)
        assert not constraint_asked(request.sampling)


def allows(pair: Pair, request: ServedRequest, text: str) -> bool:
    """Whether the structure that a request asks for allows a text."""
    from llama_ssp.extensions.grammars.text import prepare

    vocabulary, ids = pair.models.request_maker.vocabulary, pair.tokenizer(text, add_special_tokens=False).input_ids
    masks_TX = torch.full((len(ids) + 1, -(-vocabulary.size // 32)), -1, dtype=torch.int32)
    assert request.sampling
    prepare(request.sampling, vocabulary)().fill(masks_TX, ids, range(len(ids)))
    forbidden_TV = forbidden(masks_TX, range(vocabulary.size))
    return not any(forbidden_TV[place, token] for place, token in enumerate([*ids, *pair.models.eos_ids[:1]]))


@grid(
    asked=[
        {"tools": [function("weather", strict=True)]},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [WEATHER], "tool_choice": "required"},
    ],
    form_name=list(TEMPLATES),
)
def test_strict_and_single_calls_are_constrained(
    served: Pair, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], form_name: str
) -> None:
    """And a text before them, or in place of them, stays free where it may be one."""
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of(form_name))
    [request] = reader_of(served).read(CHAT | asked, is_chat=True).completions
    assert request.sampling
    call = [part.replace("{call}", written(form_name, "weather", city="Rom")) for part in CALLS[form_name]]
    good = call[0] + {"mistral": "]", "apriel": "]</tool_calls>"}.get(form_name, "")
    wrong = good.replace("Rom", "Paris")
    lead = "" if form_name == "llama" else "I see: "

    assert allows(served, request, good)
    assert not allows(served, request, wrong)
    is_free = asked.get("tool_choice") != "required"
    assert allows(served, request, "Just {a text}.") == is_free
    if lead:
        assert allows(served, request, lead + good) == is_free
    assert not allows(served, request, lead + wrong)


@pytest.mark.seconds
def test_a_mark_that_is_a_special_token_is_seen_though_it_has_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with load("tiny") as pair:
        tokenizer = pair.tokenizer
        tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("[TOOL_CALLS]", special=True)]})
        mark = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
        monkeypatch.setattr(tokenizer, "chat_template", template_of("mistral"))
        asked = {**CHAT, "tools": [WEATHER]}
        ids = tokenizer('I see [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rom"}}]').input_ids
        assert mark in ids
        tools = tools_of(asked | {"tool_choice": "required"}, tokenizer)
        assert tools
        assert f"<[{mark}]>" in (tools.grammar or "")
        text = MarkedText(tokenizer, (80,), tools.marks)
        pieces = "".join(piece.text for piece in [*text.push(ids), *text.flush()])
        shown, [call] = CallReader(tools).push(pieces, is_over=True)
        assert (shown.strip(), call.name, call.arguments) == ("I see", "weather", '{"city": "Rom"}')


def test_calls_between_special_tokens_are_all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [AddedToken(text, special=True) for text in ("<tool_call>", "</tool_call>")]
    with load("tiny") as pair:
        pair.tokenizer.add_special_tokens({"additional_special_tokens": marks})
        monkeypatch.setattr(pair.tokenizer, "chat_template", template_of("hermes"))
        calls = [f"<tool_call>\n{written('hermes', 'weather', city=city)}\n</tool_call>" for city in ("Rom", "Bonn")]
        whole, streamed = answer_to(pair, "\n".join(calls), asked={"tools": [WEATHER]}, step=1)
    found = [json.loads(call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
    assert (found, whole["message"]["content"]) == ([{"city": "Rom"}, {"city": "Bonn"}], None)
    assert streamed["tool_calls"] == whole["message"]["tool_calls"]


MEANT = {
    "a doubled mark": ("hermes", "<tool_call>\n<tool_call>\n{rom}\n</tool_call>\n</tool_call>\n", ""),
    "a mark, a text and a call": ("hermes", "<tool_call>So: <tool_call>{rom}</tool_call>", "<tool_call>So:"),
    "an end without a call": ("hermes", "So </tool_call>", None),
    "two lists": ("mistral", "Yes [TOOL_CALLS][{rom}][TOOL_CALLS] [{rom}]", "Yes"),
    "a list after a wrong one": ("mistral", "[TOOL_CALLS]so [TOOL_CALLS][{rom}]", "[TOOL_CALLS]so"),
    "a text around a call": ("llama", "Here {{it}} is: {rom} More?", "Here {it} is: More?"),
    "calls within a text": ("llama", "First {rom}, then {rom}; {rom}.", "First then ."),
    "a name that is none": ("llama", 'A {{"name": "x"}} is {rom}', 'A {"name": "x"} is'),
    "half a name": ("llama", 'A {{"name', None),
    "an object and a call": ("llama", '{{"a": 1}} then {rom}', '{"a": 1} then'),
    "a list in marks": ("apriel", "So <tool_calls>[{rom}, {rom}]</tool_calls>", "So"),
    "ids in a list": ("apriel", '<tool_calls>[{{"name": "weather", "arguments": {{}}, "id": "a"}}]</tool_calls>', ""),
}


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("case", list(MEANT))
def test_calls_are_read_as_their_models_mean_them(
    served: Pair, monkeypatch: pytest.MonkeyPatch, case: str, step: int, key: str
) -> None:
    name, text, shown = MEANT[case]
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of(name))
    called = json.dumps({"name": "weather", key if name == "llama" else "arguments": {"city": "Rom"}})
    written_ = text.format(rom=called)
    whole, streamed = answer_to(served, written_, asked={"tools": [WEATHER]}, step=step)
    message = whole["message"]
    calls = [one["function"]["name"] for one in message.get("tool_calls", ())]
    assert calls == ["weather"] * (0 if shown is None else text.count("{rom}") or 1)
    content = written_ if shown is None else shown
    assert [" ".join((one["content"] or "").split()) for one in (message, streamed)] == [content] * 2


def test_a_restricted_call_of_llama_3_is_the_whole_answer(served: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since its grammar leaves a text free, in which a call would be free too."""
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of("llama"))
    asked = {"tools": [function("weather", strict=True)]}
    call = written("llama", "weather", city="Paris")
    assert answer_to(served, f"So {call}", asked=asked)[0]["message"]["content"] == f"So {call}"
    assert len(answer_to(served, call, asked=asked)[0]["message"]["tool_calls"]) == 1


EMPTY: dict[str, Any] = {
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "name": None,
    "tool_calls": [],
}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
@pytest.mark.parametrize("content", ["", None, []])
def test_histories_are_read_as_clients_send_them(served: Pair, arguments: object, content: object) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"} | EMPTY,
        {"role": "assistant", "content": content} | EMPTY,
        {"role": "user", "content": ""},
        EMPTY | {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": content},
    ]
    tools = [function("weather", strict=None), {"type": "function", "function": {"name": "now", "parameters": None}}]
    [request] = reader_of(served).read({**CHAT, "messages": messages, "tools": tools}, is_chat=True).completions
    found = str(served.tokenizer.decode([*request.prompt_ids]))
    assert " ".join(found.split()) == "weather now user: x assistant: user: assistant: weather tool:"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"role": "user", "content": None}, "message 2 must be an object with role and content"),
        ({"content": "x"}, "message 2 must be"),
        ("x", "message 2 must be"),
        ({"role": "user", "content": 5}, "message 2 must be"),
        ({"role": "user", "content": [{"type": "text"}]}, "message 2 must be"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url in message 2"),
        ({"role": "user", "content": "x", "audio": {"id": "a"}}, "'audio' of message 2"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "a"}}, "'function_call' of message 2"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "a", "arguments": "["}}]}, "message 2"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "a", "arguments": 0}}]}, "message 2"),
    ],
    ids=str,
)
def test_a_refusal_names_the_number_of_the_message(
    served: Pair, monkeypatch: pytest.MonkeyPatch, wrong: object, said: str
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of("hermes"))
    messages = [{"role": "user", "content": "x"}, wrong, {"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match=said) as error:
        reader_of(served).read({**CHAT, "messages": messages}, is_chat=True)
    assert error.value.param == "messages"


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_forced_tool_without_parameters_has_none(
    served: Pair, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    need("grammars")
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of("hermes"))
    tools = [{"type": "function", "function": {"name": "now"} | parameters}]
    [request] = reader_of(served).read(CHAT | {"tools": tools, "tool_choice": "required"}, is_chat=True).completions
    start = '<tool_call>\n{"name": "now", "arguments": '
    assert allows(served, request, start + "{}}\n</tool_call>")
    assert not allows(served, request, start + '{"a": 1}}\n</tool_call>')


DEEP: dict[str, Any] = json.loads('{"a":' * 300 + "{}" + "}" * 300)
DEEP_CALL = {"id": "a", "function": {"name": "weather", "arguments": '{"a":' * 300 + "1" + "}" * 300}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [function("a b")]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [function(f"a{n}") for n in range(129)]}, "tools"),
        ({"tools": [function("a\ud800")]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"tools": [function("a", {"type": "string"})]}, "tools"),
        ({"tools": [function("a", strict="x")]}, "tools"),
        ({"tools": [function("a", returns={})]}, "tools"),
        ({"tools": [WEATHER | {"cache": True}]}, "tools"),
        ({"tools": [function("a", description=["x"])]}, "tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather", "a": 1}}},
            "tool_choice",
        ),
        ({"tools": [function("a", DEEP)]}, None),
        ({"tools": [function("a", {"not": {}}, strict=True)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": 3}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [WEATHER], "guided_regex": "a"}, "tools"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}, CHAT["messages"][0]]}, "messages"),
        ({"messages": [{"role": "user", "tool_calls": [1]}, CHAT["messages"][0]]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}, CHAT["messages"][0]]}, "messages"),
    ],
    ids=lambda value: str(value)[:99],
)
def test_what_cannot_be_called_is_refused_by_a_field(
    served: Pair, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], param: str
) -> None:
    if "guided_regex" in asked:
        need("grammars")
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of("hermes"))
    with pytest.raises(RequestError) as error:
        reader_of(served).read(CHAT | asked, is_chat=True)
    assert error.value.param == param, error.value.message


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"chat_template_kwargs": 1}, "chat_template_kwargs must be an object"),
        ({"tools": DEEP}, "inside each other"),
        ({"chat_template_kwargs": None, "tools": None}, None),
    ],
)
def test_a_body_whose_tokens_are_counted_is_checked_as_others(
    served: Pair, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], said: str | None
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", template_of("hermes"))
    if said is None:
        assert reader_of(served).tokenize({"messages": CHAT["messages"]} | more)
    else:
        with pytest.raises(RequestError, match=said):
            reader_of(served).tokenize({"messages": CHAT["messages"]} | more)


@pytest.mark.parametrize(
    "teaching",
    ["", "<tool_call><function=f><parameter=a>", '<tool_call>f\n<arg_key>"arguments"', "[TOOL_CALLS]f[ARGS]{}"],
)
def test_a_template_of_another_form_is_refused_with_the_forms_that_are_known(
    served: Pair, monkeypatch: pytest.MonkeyPatch, teaching: str
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", "{# " + teaching + " #}" + BODY)
    with pytest.raises(RequestError, match=r"known form: those of Hermes and Qwen 3 .*, Llama 3, Mistral .*") as error:
        reader_of(served).read({**CHAT, "tools": [WEATHER]}, is_chat=True)
    assert error.value.param == "tools"
    assert reader_of(served).read({**CHAT, "tools": [WEATHER], "tool_choice": "none"}, is_chat=True).completions
    messages = [{"role": "assistant", "tool_calls": [{"id": "a"}]}, CHAT["messages"][0]]
    with pytest.raises(RequestError, match="a known form"):
        reader_of(served).read({**CHAT, "messages": messages}, is_chat=True)


def test_a_completion_has_no_tools(served: Pair) -> None:
    with pytest.raises(RequestError) as error:
        reader_of(served).read({"prompt": "x", "tools": [WEATHER]}, is_chat=False)
    assert error.value.param == "tools"

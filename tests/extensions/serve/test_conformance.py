"""What public suites of other servers ask, as cases of our own: each row of the page's table holds, or is refused."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.extensions.serve.thoughts import thoughts_of
from tests.extensions.serve.answers import CASES, KINDS, WEATHER, is_read_at_every_cut, offered, read
from tests.extensions.serve.server import PROMPT, Server, serving
from tests.helpers.extensions import need
from tests.helpers.repository import ROOT

PAGE = ROOT / "llama_ssp" / "extensions" / "serve" / "page.md"
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "code"}, {"role": "user", "content": "def f"}]
Check = Callable[[Server], bool]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pair = load("tiny", "tiny-draft")
    pair.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    with serving(pair) as server:
        yield server


def text(server: Server, **body: object) -> dict[str, Any]:
    return server.complete(**{"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **body})


def chat(server: Server, **body: object) -> dict[str, Any]:
    status, answer = server.ask(CHATS, {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, **body})
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def first(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]
    return found


def status(server: Server, path: str, **body: object) -> int:
    given = {"prompt": PROMPT} if path == TEXTS else {"messages": MESSAGES}
    return int(server.ask(path, given | body)[0])


def is_streamed(server: Server) -> bool:
    events = server.stream(TEXTS, prompt=PROMPT, max_tokens=8, temperature=0)
    pieces = [first(event) for event in events]
    reasons = [piece["finish_reason"] for piece in pieces]
    whole = first(text(server))
    return bool("".join(piece["text"] for piece in pieces) == whole["text"] and reasons[-1] == whole["finish_reason"])


def are_two_streamed(server: Server) -> bool:
    events = server.stream(TEXTS, prompt=PROMPT, max_tokens=8, n=2, seed=1, temperature=1)
    streamed = ["".join(first(event)["text"] for event in events if first(event)["index"] == place) for place in (0, 1)]
    return streamed == [one["text"] for one in text(server, n=2, seed=1, temperature=1)["choices"]]


def has_usage_when_asked(server: Server) -> bool:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8}
    last = server.stream(TEXTS, **asked, stream_options={"include_usage": True})[-1]
    none = server.stream(TEXTS, **asked, stream_options={"include_usage": False})
    each = server.stream(TEXTS, **asked, stream_options={"include_usage": True, "continuous_usage_stats": True})
    ends = last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    return ends and not any("usage" in event for event in none) and all("usage" in event for event in each)


def has_offsets(server: Server) -> bool:
    choice = first(text(server, logprobs=1))
    scores, shown = choice["logprobs"], choice["text"]
    return all(
        shown[place:].startswith(token) for token, place in zip(scores["tokens"], scores["text_offset"], strict=True)
    )


def scores_the_prompt(server: Server) -> bool:
    choice = first(text(server, echo=True, logprobs=1, max_tokens=1))
    begins = choice["text"].startswith(PROMPT) and choice["logprobs"]["token_logprobs"][0] is None
    return begins and all(one <= 0 for one in choice["logprobs"]["token_logprobs"][1:])


def takes_the_bias(server: Server) -> bool:
    ids = server.ask("/tokenize", {"prompt": "return"})[1]["tokens"][-1:]
    word = server.ask("/detokenize", {"tokens": ids})[1]["prompt"]
    return str(first(text(server, logit_bias={str(ids[0]): 100}, max_tokens=3))["text"]).count(word.strip()) == 3


def takes_all_prompts(server: Server) -> bool:
    ids = server.ask("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    alone = first(text(server))["text"]
    forms: list[object] = [[PROMPT, PROMPT], ids, [ids, ids]]
    return all({one["text"] for one in text(server, prompt=form)["choices"]} == {alone} for form in forms)


def refuses_wrong_prompts(server: Server) -> bool:
    wrong: list[object] = [[], [[]], 5, {"a": 1}, [-1], [10**9], ["x", 5], None]
    return {server.ask(TEXTS, {"prompt": prompt})[0] for prompt in wrong} == {400}


def stops_before(server: Server) -> bool:
    whole = first(text(server, max_tokens=40))["text"]
    stop = whole[12:15]
    found = first(text(server, max_tokens=40, stop=[stop]))
    return bool(found["finish_reason"] == "stop" and found["text"] == whole[: whole.index(stop)])


def chats_in_one_form(server: Server) -> bool:
    whole = chat(server)
    message = first(whole)["message"]
    used = whole["usage"]
    total = used["prompt_tokens"] + used["completion_tokens"] == used["total_tokens"]
    return bool(message["role"] == "assistant" and first(whole)["finish_reason"] == "length" and total)


def streams_chats(server: Server) -> bool:
    events = server.stream(CHATS, messages=MESSAGES, max_tokens=8, temperature=0)
    deltas = [first(event)["delta"] for event in events]
    begins = deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    return begins and "".join(delta["content"] for delta in deltas) == first(chat(server))["message"]["content"]


def has_scores(server: Server, number: int) -> bool:
    scores = first(chat(server, logprobs=True, top_logprobs=number))["logprobs"]["content"]
    return len(scores) == 8 and all(len(one["top_logprobs"]) == number and one["bytes"] for one in scores)


def has_scores_of_texts(server: Server) -> bool:
    few, many = (first(text(server, logprobs=number))["logprobs"]["top_logprobs"] for number in (0, 5))
    are_right = {len(top) for top in few} == {1} and {len(top) for top in many} <= {5, 6}
    return are_right and status(server, TEXTS, logprobs=99) == 400


def refuses_wrong_messages(server: Server) -> bool:
    wrong: list[object] = [[], [{}], "x", [{"content": "x"}]]
    return {status(server, CHATS, messages=messages) for messages in wrong} == {400}


def has_structures(server: Server) -> bool:
    need("grammars")
    texts = [
        first(chat(server, **more))["message"]["content"]
        for more in ({"guided_choice": ["yes"]}, {"structured_outputs": {"regex": "ab"}})
    ]
    return texts == ["yes", "ab"]


def has_a_schema(server: Server) -> bool:
    need("grammars")
    asked = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 1}}}
    return bool(first(chat(server, response_format=asked))["message"]["content"] == "1")


def counts_with_requests(server: Server) -> bool:
    found = {name: server.ask(f"/{name}")[0] for name in ("health", "metrics", "v1/models", "v1/models/tiny")}
    return {*found.values()} == {200} and server.ask("/v1/models/other")[0] == 404


@contextmanager
def template(server: Server, source: str) -> Iterator[Any]:
    """The tokenizer of a server, with another chat template."""
    tokenizer = server.session.models.tokenizer
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenizer, "chat_template", source)
        yield tokenizer


def reads_thoughts(server: Server) -> bool:
    found = []
    for kind, text, wanted in CASES.values():
        with template(server, kind.template) as tokenizer:
            ids = tokenizer("" if kind.begins else "<think>\n").input_ids
            thoughts = thoughts_of(tokenizer, None, ids)
            found.append(thoughts and is_read_at_every_cut(text, wanted, thoughts, offered(tokenizer)))
    return all(found)


def thinks_in_the_prompt(server: Server) -> bool:
    with template(server, KINDS["QwQ"].template):
        whole = chat(server)
        events = server.stream(CHATS, messages=MESSAGES, max_tokens=8, temperature=0)
        _, answer = server.ask("/v1/responses", {"input": "def f", "max_output_tokens": 8, "temperature": 0})
    message, counted = first(whole)["message"], whole["usage"]["completion_tokens_details"]
    deltas = [first(event)["delta"] for event in events]
    streamed = "".join(delta.get("reasoning_content", "") for delta in deltas)
    is_whole = (message["content"], counted["reasoning_tokens"], streamed) == (None, 8, message["reasoning_content"])
    [item] = answer["output"]
    has_item = item["type"] == "reasoning" and item["content"][0]["type"] == "reasoning_text"
    return is_whole and has_item and answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 8


def reads_calls_as_meant(server: Server) -> bool:
    kinds = {"Qwen 3": "<tool_call>{}", "Magistral": "[TOOL_CALLS]{}", "Llama 3": "It is: {}"}
    found = []
    for name, lead in kinds.items():
        kind = KINDS[name]
        with template(server, kind.template) as tokenizer:
            thoughts = thoughts_of(tokenizer, None, [])
            assert thoughts
            both = (kind.called, kind.called.replace("parameters", "arguments"))
            found += [read([lead.format(called)], thoughts, offered(tokenizer))[2] for called in both]
    return found == [1] * 6


def takes_histories(server: Server) -> bool:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}}
    empty: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    messages = [
        {"role": "user", "content": "x"},
        empty | {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": None}}]
    with template(server, KINDS["Qwen 3"].template):
        return bool(first(chat(server, messages=messages, tools=tools)))


def refuses_unknown_keys(server: Server) -> bool:
    function = WEATHER["function"]
    wrong = [WEATHER | {"cache": 1}, {"type": "function", "function": function | {"returns": {}}}]
    with template(server, KINDS["Qwen 3"].template):
        return {status(server, CHATS, tools=[tool]) for tool in wrong} == {400}


def has_an_object_of_a_schema(server: Server) -> bool:
    need("grammars")
    asked = {"type": "json_object", "schema": {"const": {"a": 1}}}
    return bool(json.loads(first(chat(server, response_format=asked, max_tokens=20))["message"]["content"]) == {"a": 1})


def ends_with_its_structure(server: Server) -> bool:
    need("grammars")
    choices = [first(text(server, guided_choice=["ab"], **more)) for more in ({"min_tokens": 6}, {"ignore_eos": True})]
    return {(choice["text"], choice["finish_reason"]) for choice in choices} == {("ab", "stop")}


def refuses_what_no_library_makes(server: Server) -> bool:
    need("grammars")
    made = [status(server, TEXTS, guided_regex=regex, max_tokens=2) for regex in ("a{65535}", "(a?){1000}a{1000}")]
    refused = status(server, TEXTS, guided_json={"not": {"type": "string"}})
    return made == [200, 200] and refused == 400


def tokenizes(server: Server) -> bool:
    _, found = server.ask("/tokenize", {"prompt": "def x", "return_token_strs": True})
    _, bare = server.ask("/tokenize", {"prompt": "def x", "add_special_tokens": False})
    is_named = found["tokens"][1:] == bare["tokens"] and len(found["token_strs"]) == found["count"]
    return is_named and server.ask("/tokenize", {"prompt": "x", "other": 1})[0] == 400


def streams_ids(server: Server) -> bool:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    whole, events = first(server.complete(**asked)), server.stream(TEXTS, **asked)
    told = [first(event).get("prompt_token_ids") for event in events]
    ids = [token for event in events for token in first(event)["token_ids"]]
    return bool(ids == whole["token_ids"] and told[0] == whole["prompt_token_ids"] and not any(told[1:]))


def has_null_usage(server: Server) -> bool:
    options = {"include_usage": True}
    *events, _ = server.stream(TEXTS, prompt=PROMPT, max_tokens=8, temperature=0, stream_options=options)
    return all(event["usage"] is None for event in events)


def echoes_responses(server: Server) -> bool:
    asked = {"temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "instructions": "be", "max_output_tokens": 8}
    _, answer = server.ask("/v1/responses", {"input": "x", "truncation": "auto", **asked})
    return bool({name: answer[name] for name in asked} == asked)


def has_dashboards(server: Server) -> bool:
    text(server)
    _, page = server.ask("/metrics")
    times = ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token", "request_queue_time")
    names = [
        *(f"vllm:{name}_seconds_bucket" for name in times),
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
    ]
    return all(name in page for name in names)


HOLDS: dict[tuple[str, str], Check] = {
    ("vLLM, completions", "a streamed text is the whole one"): is_streamed,
    ("vLLM, completions", "`n` texts streamed at once, by `index`"): are_two_streamed,
    ("vLLM, completions", "usage at the end of a stream, in every event, or never"): has_usage_when_asked,
    ("vLLM, completions", "one seed, one text"): lambda server: (
        len({first(text(server, seed=4, temperature=1))["text"] for _ in range(2)}) == 1
    ),
    ("vLLM, completions", "`logit_bias` of 100 decides"): takes_the_bias,
    ("vLLM, completions", "`logprobs=0` and `5`, and an error beyond the most"): has_scores_of_texts,
    ("vLLM, `text_offset`", "each token stands at its offset"): has_offsets,
    ("vLLM, completions", "`echo` with the prompt's log-probabilities"): scores_the_prompt,
    ("vLLM, prompt validation", "texts, token ids, and lists of them"): takes_all_prompts,
    (
        "vLLM, prompt validation",
        "empty lists, mixed lists and ids beyond the vocabulary get status 400",
    ): refuses_wrong_prompts,
    ("vLLM, prompt validation", "more tokens than the context get status 400"): lambda server: (
        status(server, TEXTS, max_tokens=10**6) == 400
    ),
    ("vLLM, chats", "`top_logprobs` of 0, 5, and too many"): lambda server: (
        has_scores(server, 0) and has_scores(server, 5) and status(server, CHATS, logprobs=True, top_logprobs=99) == 400
    ),
    ("vLLM, chats", "`top_logprobs` without `logprobs` gets status 400"): lambda server: (
        status(server, CHATS, top_logprobs=1) == 400
    ),
    ("vLLM, chats", "`guided_choice` and `structured_outputs` decide the text"): has_structures,
    ("vLLM, chats", "no messages, or messages without a role, get status 400"): refuses_wrong_messages,
    (
        "vLLM, reasoning",
        "thoughts of four kinds of models, whole and at every cut; a call in them is none",
    ): reads_thoughts,
    ("vLLM, reasoning", "a template that opens `<think>`, in chats, streams and responses"): thinks_in_the_prompt,
    (
        "vLLM, tool parsers",
        "a doubled mark, a text before a call of Llama 3, and its `arguments`",
    ): reads_calls_as_meant,
    ("OpenAI, chats", "empty arguments, parameters, contents and fields of messages"): takes_histories,
    ("OpenAI, chats", "unknown keys of tools get status 400"): refuses_unknown_keys,
    ("OpenAI, streams", "`usage` is null before the event that has it"): has_null_usage,
    ("OpenAI, responses", "sampling, metadata, instructions and limits are echoed"): echoes_responses,
    ("vLLM, completions", "`return_token_ids`, in streams too"): streams_ids,
    (
        "vLLM, completions",
        "a text ends with its structure, whatever `min_tokens` and `ignore_eos` say",
    ): ends_with_its_structure,
    (
        "vLLM, completions",
        "expressions of many repetitions; what the library cannot make gets status 400",
    ): refuses_what_no_library_makes,
    ("vLLM, tokenize", "`return_token_strs`, `add_special_tokens`, and no unknown field"): tokenizes,
    ("vLLM, metrics", "the names that its dashboards read"): has_dashboards,
    ("llama.cpp", "`response_format` of type `json_object` with a schema"): has_an_object_of_a_schema,
    ("llama.cpp", "a chat has role, reason and usage"): chats_in_one_form,
    ("llama.cpp", "a stream begins with the role, once"): streams_chats,
    ("llama.cpp", "`stop` ends the text before it"): stops_before,
    ("llama.cpp", "several choices for `n`"): lambda server: len(chat(server, n=3, temperature=1)["choices"]) == 3,
    ("llama.cpp", "`response_format` with a schema"): has_a_schema,
    ("llama.cpp", "health, metrics and models"): counts_with_requests,
}
REFUSED: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("vLLM, completions", "`prompt_logprobs`"): (TEXTS, {"prompt_logprobs": 1}),
    ("vLLM, completions", "`allowed_token_ids`"): (TEXTS, {"allowed_token_ids": [1]}),
    ("vLLM, completions", "`use_beam_search`"): (TEXTS, {"use_beam_search": True}),
    ("vLLM, completions", "`best_of` above 1"): (TEXTS, {"best_of": 2}),
    ("vLLM, completions", "`suffix`"): (TEXTS, {"suffix": "x"}),
    ("vLLM, chats", "`echo`"): (CHATS, {"echo": True}),
    ("vLLM, chats", "`documents`"): (CHATS, {"documents": [{}]}),
    ("llama.cpp", "`grammar`, as GBNF"): (CHATS, {"grammar": 'root ::= "a"'}),
    ("llama.cpp", "`cache_prompt`"): (TEXTS, {"cache_prompt": True}),
    ("llama.cpp", "`mirostat`"): (TEXTS, {"mirostat": 1}),
}


@pytest.mark.seconds
@pytest.mark.parametrize("case", list(HOLDS), ids=" ".join)
def test_a_case_holds(server: Server, case: tuple[str, str]) -> None:
    assert HOLDS[case](server)


@pytest.mark.parametrize("case", list(REFUSED), ids=" ".join)
def test_a_case_is_refused_by_the_name_of_its_field(server: Server, case: tuple[str, str]) -> None:
    path, more = REFUSED[case]
    given = {"prompt": PROMPT} if path == TEXTS else {"messages": MESSAGES}
    code, answer = server.ask(path, given | more)
    assert (code, answer["error"]["param"]) == (400, next(iter(more)))
    assert case[1].startswith(f"`{next(iter(more))}`")


def test_the_page_has_each_case_and_no_other() -> None:
    section = PAGE.read_text().partition("## What other suites ask\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \| (holds|refused) \|$", section, re.MULTILINE)
    wanted = dict.fromkeys(HOLDS, "holds") | dict.fromkeys(REFUSED, "refused")
    assert {(suite, name): how for suite, name, how in rows} == wanted
    assert len(rows) == len(wanted)

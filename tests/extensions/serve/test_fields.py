"""What clients send beside OpenAI's usual fields, and what tools read."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from llama_ssp import Pair, load
from llama_ssp.extensions.serve.inbox import ClientId, Inbox, Part, RequestError, ServedRequest
from llama_ssp.extensions.serve.records import ServeConfig
from tests.extensions.serve.server import JSON, PROMPT, Server, serving

ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "x"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ reasoning_effort or '' }}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pair = load("tiny", "tiny-draft")
    pair.tokenizer.chat_template = TEMPLATE
    with serving(pair, task=ServeConfig(port=0, model_names=["gpt-4o", "other"])) as server:
        yield server


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


@pytest.mark.seconds
def test_a_request_says_how_much_is_drafted_for_it(server: Server) -> None:
    whole, plain, few = (
        server.complete(**ASKED, return_accepted_lengths=True, **more)
        for more in ({}, {"speculative": False}, {"num_draft_tokens": 1})
    )
    assert text_of(whole) == text_of(plain) == text_of(few)
    used = [answer["usage"]["completion_tokens_details"] for answer in (whole, plain, few)]
    lengths = [answer["choices"][0]["accepted_lengths"] for answer in (whole, plain, few)]
    assert (used[1]["accepted_prediction_tokens"], used[1]["rejected_prediction_tokens"]) == (0, 0)
    assert max(lengths[0]) > max(lengths[2]) == 1
    assert [sum(own) for own in lengths] == [each["accepted_prediction_tokens"] for each in used]
    assert [len(own) for own in lengths] == [each["rounds"] for each in used]
    assert used[0]["rounds"] < used[2]["rounds"] < used[1]["rounds"]
    assert "accepted_lengths" not in server.complete(**ASKED)["choices"][0]


def test_counters_have_the_names_that_tools_read(server: Server) -> None:
    """As `vllm bench serve` reads them: lines that begin so, summed by their last word, with a place in a label."""

    def counted() -> dict[str, float]:
        _, page = server.ask("/metrics")
        found = dict[str, float]()
        for line in page.splitlines():
            if line.startswith("vllm:spec_decode"):
                name = line.partition("{")[0] + ("@" + line.partition('position="')[2][0] if "position" in line else "")
                found[name.removeprefix("vllm:spec_decode_")] = float(line.split()[-1])
        return found

    before = counted()
    answer = server.complete(**ASKED, return_accepted_lengths=True)
    lengths, used = answer["choices"][0]["accepted_lengths"], answer["usage"]["completion_tokens_details"]
    added = {name: number - before.get(name, 0) for name, number in counted().items()}
    assert not [name for name in added if name.endswith("_created")], "a time stamp would be added to the counts"
    accepted = used["accepted_prediction_tokens"]
    assert added["num_accepted_tokens_total"] == accepted
    assert added["num_draft_tokens_total"] == accepted + used["rejected_prediction_tokens"]
    assert 0 < added["num_drafts_total"] <= len(lengths)
    by_place = [added[f"num_accepted_tokens_per_pos_total@{place}"] for place in range(max(lengths))]
    assert by_place == [sum(length > place for length in lengths) for place in range(max(lengths))]
    _, page = server.ask("/metrics")
    names = ("first_token_seconds", "waiting_seconds", "request_seconds", "running_rows", "ms_per_token")
    counts = [
        line.split()[1] for line in page.splitlines() for name in names if line.startswith(f"llama_ssp_{name}_count")
    ]
    assert len({*counts}) == 1 < len(counts) == len(names), "each completion is counted in each histogram"
    assert float(counts[0]) >= 1
    assert 'llama_ssp_first_token_seconds_bucket{le="50.0"}' in page


def test_usage_may_be_in_every_event(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream("/v1/completions", **ASKED, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0] < 40, counts[-1]) == (True, 40)


@pytest.mark.seconds
def test_texts_end_at_tokens_and_not_before_their_least_length(server: Server) -> None:
    plain = text_of(server.complete(**ASKED))
    ids = server.ask("/tokenize", {"prompt": plain})[1]["tokens"]
    place = next(place for place in range(3, len(ids)) if ids[place] not in ids[:place])
    word = server.ask("/detokenize", {"tokens": [ids[place]]})[1]["prompt"]
    short = server.complete(**ASKED, stop_token_ids=[ids[place]])
    assert short["choices"][0]["finish_reason"] == "stop"
    assert plain.startswith(f"{text_of(short)}{word}")
    shown = server.complete(**ASKED, stop_token_ids=[ids[place]], include_stop_str_in_output=True)
    assert text_of(shown) == f"{text_of(short)}{word}"
    least = server.complete(**ASKED, stop_token_ids=[ids[place]], min_tokens=30)
    assert least["usage"]["completion_tokens"] >= 30
    assert word not in text_of(least)[: len(text_of(short)) + len(word)]
    ended, kept = (server.complete(**ASKED, stop=["fault"], include_stop_str_in_output=more) for more in (False, True))
    assert text_of(kept) == f"{text_of(ended)}fault"


def test_texts_become_tokens_and_tokens_texts(server: Server) -> None:
    _, found = server.ask("/tokenize", {"prompt": PROMPT})
    assert found["count"] == len(found["tokens"])
    assert server.ask("/detokenize", {"tokens": found["tokens"]})[1]["prompt"].endswith(PROMPT)
    chat = server.ask("/tokenize", {"messages": [{"role": "user", "content": "x"}]})[1]["tokens"]
    assert server.ask("/detokenize", {"tokens": chat})[1]["prompt"].endswith("user: x\n")
    for path, body in (("tokenize", {"prompt": 5}), ("detokenize", {"tokens": [10**6]}), ("detokenize", [])):
        assert server.ask(f"/{path}", body)[0] == 400


@pytest.mark.seconds
@pytest.mark.parametrize("streams", [False, True])
def test_the_openai_package_gets_responses(server: Server, streams: bool) -> None:
    import openai  # all workers would, and it takes a second

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "gpt-4o",
            "input": "def f",
            "instructions": "code",
            "max_output_tokens": 16,
            "temperature": 0,
            "reasoning": {"effort": "low"},
        }
        messages = [{"role": "system", "content": "code"}, {"role": "user", "content": "def f"}]
        chat = client.chat.completions.create(
            model="other",
            messages=messages,
            max_tokens=16,
            temperature=0,
            reasoning_effort="low",
        )
        if streams:
            events = [*client.responses.create(**asked, stream=True)]
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert [event.sequence_number for event in events] == [*range(len(events))]
            whole = events[-1].response
        else:
            whole = client.responses.create(**asked)
            text = whole.output_text
        assert text == whole.output_text == chat.choices[0].message.content
        assert (whole.status, whole.usage.output_tokens, whole.model) == ("incomplete", 16, "gpt-4o")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(**asked, previous_response_id="x")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"num_draft_tokens": 2, "speculative": False}, "speculative"),
        ({"min_tokens": 41}, "min_tokens"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"stop_token_ids": [*range(17)]}, "stop_token_ids"),
        ({"model": "gpt-5"}, "model"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(server: Server, body: dict[str, Any], param: str) -> None:
    status, answer = server.ask("/v1/completions", ASKED | body)
    assert status in {400, 404}
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"type": "image", "content": "x"}]}, "input"),
        ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "include": ["y"]}, "include"),
        ({"input": "x", "logprobs": True}, "logprobs"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": "x", "instructions": []}, "instructions"),
    ],
)
def test_a_response_that_cannot_be_made_is_refused_by_a_field(server: Server, body: dict[str, Any], param: str) -> None:
    status, answer = server.ask("/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"prompt": "x", "models": "tiny"}, "models"),
        ("tokenize", {"prompt": "x", "model": "y"}, "model"),
        ("tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("tokenize", {}, "prompt"),
        ("tokenize", [], None),
        ("tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("detokenize", {"tokens": [1], "skip": True}, "skip"),
        ("detokenize", {"tokens": [True]}, "tokens"),
        ("v1/completions", {"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_what_is_not_obeyed_is_refused(server: Server, path: str, body: object, param: str | None) -> None:
    status, answer = server.ask(f"/{path}", body)
    assert (status // 100, answer["error"]["param"]) == (4, param), answer


def test_tokens_come_with_their_names_and_without_special_ones_if_asked(server: Server) -> None:
    _, found = server.ask("/tokenize", {"prompt": "def x", "return_token_strs": True, "model": "tiny"})
    _, bare = server.ask("/tokenize", {"prompt": "def x", "add_special_tokens": False})
    assert found["tokens"][1:] == bare["tokens"]
    assert len(found["token_strs"]) == found["count"] == bare["count"] + 1
    assert "token_strs" not in bare


@pytest.mark.seconds
def test_events_before_the_last_say_that_they_have_no_usage(server: Server) -> None:
    *events, last = server.stream("/v1/completions", **ASKED, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events)
    assert last["usage"]["completion_tokens"] == 40


@pytest.mark.seconds
def test_a_server_without_a_draft_says_so() -> None:
    with serving(load("tiny")) as plain:
        assert plain.complete(**ASKED, speculative=False)
        status, answer = plain.ask("/v1/completions", ASKED | {"num_draft_tokens": 2})
        assert (status, answer["error"]["message"]) == (400, "this server has no draft: leave num_draft_tokens out")


def test_clients_take_turns_by_the_tokens_that_they_have_had() -> None:
    inbox = Inbox(most_waiting=99)

    def put(client: str, number: int, length: int) -> None:
        request = ServedRequest(index=0, prompt_ids=(1,) * length, max_new_tokens=10, seed=ord(client))
        inbox.put([request] * number, lambda *_: None, client=ClientId(address=client))

    def take(number: int) -> str:
        return "".join(chr(one.seed or 0) for one in inbox.take(number, wait_s=0)[0])

    put("a", 6, 10)
    assert take(2) == "aa"
    put("b", 3, 10)
    put("c", 2, 90)
    assert take(5) == "abcab", "those that come begin with as many as a has had"
    assert take(9) == "abac", "c has had a long one"
    assert inbox.num_waiting == 0
    with pytest.raises(RequestError, match="at most 99 may wait"):
        put("d", 100, 1)


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_client_has_had_the_tokens_that_it_got_not_those_that_it_asked_for(is_dropped: bool) -> None:
    """Clients that stop early do not wait for the turns of those who ask for little."""
    inbox = Inbox(most_waiting=99)
    long, short = (ServedRequest(index=0, prompt_ids=(1,), max_new_tokens=most, seed=most) for most in (400, 20))
    inbox.put([short] * 9, lambda *_: None, client=ClientId(address="short"))
    for _ in range(2):
        [number] = inbox.put([long], lambda *_: None, client=ClientId(address="long"))
        taken = [one.seed for one in inbox.take(2, wait_s=0)[0]]
        assert 400 in taken, "its turn has come"
        inbox.deliver(number, Part(new_ids=[5]))
        inbox.put([long], lambda *_: None, client=ClientId(address="long"))
        assert [one.seed for one in inbox.take(2, wait_s=0)[0]] == [20, 20], "it may get 399 more"
        if is_dropped:
            inbox.drop([number])
        else:
            inbox.deliver(number, Part(new_ids=[6], finish_reason="stop"))
        assert [one.seed for one in inbox.take(1, wait_s=0)[0]] == [400]
        inbox.drop([number + 1])


@pytest.mark.seconds
def test_a_full_server_says_when_to_come_back(pair: Pair) -> None:
    with serving(pair, batch_size=1, drain_s=0.1, task=ServeConfig(port=0, max_waiting=1)) as server:
        for _ in range(3):
            server.complete(prompt="x", max_tokens=2)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True})
        with ExitStack() as stack:
            statuses = []
            for _ in range(3):
                connection = stack.enter_context(closing(server.connect()))
                connection.request("POST", "/v1/completions", body, JSON)
                statuses.append(connection.getresponse())
                if len(statuses) == 1:
                    statuses[0].read(1)  # it has the row, and waits no more
            assert [one.status for one in statuses] == [200, 200, 429]
            assert 1 <= int(statuses[2].headers["retry-after"]) <= 60


@pytest.mark.seconds
def test_token_ids_are_those_of_the_text(server: Server) -> None:
    """In parts too, whose text a stop may hold back, and the names of scored tokens say the same ids."""
    named = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 2}
    [choice] = server.complete(**ASKED, **named)["choices"]
    ids, prompt = choice["token_ids"], choice["prompt_token_ids"]
    assert server.ask("/detokenize", {"tokens": ids})[1]["prompt"] == choice["text"]
    assert server.ask("/tokenize", {"prompt": PROMPT})[1]["tokens"] == prompt
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    tops = choice["logprobs"]["top_logprobs"]
    assert all(top.keys() >= {name} for top, name in zip(tops, choice["logprobs"]["tokens"], strict=True))
    for stop in ([], ["never in this text"]):
        asked = {**ASKED, "stop": stop, "return_token_ids": True}
        parts = [part["choices"][0] for part in server.stream("/v1/completions", **asked)]
        assert [token for part in parts for token in part["token_ids"]] == ids
        assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [prompt]
    chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    whole, events = server.ask("/v1/chat/completions", chat)[1], server.stream("/v1/chat/completions", **chat)
    assert whole["prompt_token_ids"] == events[0]["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events[1:])
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert not {"token_ids", "prompt_token_ids"} & server.complete(**ASKED)["choices"][0].keys()

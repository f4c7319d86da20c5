"""The server answers as OpenAI's API does; texts are those of `Pair.generate`, whatever else is served."""

import asyncio
import json
import math
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp import Pair, load
from llama_ssp.architectures import engine
from llama_ssp.errors import ConfigError, LostRankError
from llama_ssp.extensions.serve import http, service
from llama_ssp.extensions.serve.http import Front
from llama_ssp.extensions.serve.inbox import Inbox
from llama_ssp.extensions.serve.records import SERVE, ServeConfig, length_of
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine import likelihoods, state
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import Round
from llama_ssp.speculate.sampling.by_row import settings_of
from tests.extensions.serve.server import JSON, PROMPT, Server, serving
from tests.helpers.disturbed import wait_for
from tests.helpers.extensions import need
from tests.helpers.lanes import heavy, slow


@pytest.fixture(scope="module")
def served() -> Pair:
    """A pair of its own: calls would take the server's caches."""
    return load("tiny", "tiny-draft")


@pytest.fixture(scope="module")
def server(served: Pair) -> Iterator[Server]:
    with serving(served) as server:
        yield server


def test_k_of_a_server_is_a_limit_up_to_which_rounds_draft_what_pays(
    served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("adaptive")
    made = list[Decoder]()

    def ready(decoder: Decoder, *given: Any, **how: Any) -> None:
        make_ready(decoder, *given, **how)
        made.append(decoder)

    monkeypatch.setattr(service, "make_ready", ready)
    with serving(served):
        pass
    [decoder] = made
    assert sorted(choice.num_tokens for choice in decoder.length.choices) == [0, 1, 2, 3, 4]
    assert served.config.speculation.num_draft_tokens == 4


@pytest.mark.heavy
def test_mixed_requests_have_the_texts_of_runs_of_their_own(pair: Pair, server: Server) -> None:
    """Greedy and sampled, with processors, seeds and several samples, at the same time."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "top_p": 0.8, "seed": 6, "n": 2},
        {"temperature": 1.2, "top_k": 5, "seed": 7},
        {"temperature": 0.9, "min_p": 0.1, "seed": 8},
        {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.25, "seed": 9},
        {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"5": 2.5}},
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: server.complete(prompt=PROMPT, max_tokens=20, **one), asked))
    for one, answer in zip(asked, found, strict=True):
        renamed = {
            "num_samples": one.get("n", 1),
            "logit_bias": {int(k): v for k, v in one.get("logit_bias", {}).items()},
        }
        own = pair.generate(
            PROMPT, max_new_tokens=20, **{k: v for k, v in one.items() if k not in {"n", "logit_bias"}}, **renamed
        )
        assert [choice["text"] for choice in answer["choices"]] == [completion.text for completion in own]
        counted = answer["usage"]
        assert counted["completion_tokens"] == sum(len(completion.token_ids) for completion in own)
        details = counted["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == sum(len(completion.accepted_ids) for completion in own)


@pytest.mark.seconds
def test_the_openai_package_completes_chats_and_streams(server: Server) -> None:
    import openai  # all workers would, and it takes a second

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        [model] = client.models.list().data
        same: dict[str, Any] = {"model": model.id, "prompt": PROMPT, "max_tokens": 24, "seed": 3, "temperature": 0.9}
        whole = client.completions.create(**same, stop=["\n\n"], n=2, logprobs=2)
        [text, _] = [choice.text for choice in whole.choices]
        streamed = client.completions.create(**same, stop=["\n\n"], stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == text
        assert "\n\n" not in text
        scores = whole.choices[0].logprobs
        assert scores
        assert scores.token_logprobs
        assert all(len(top) in {2, 3} for top in scores.top_logprobs or []), "the token is among them"
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "x"}])


def test_chats_stream_with_their_template(served: Pair, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 4, "logprobs": True}
    status, whole = server.ask("/v1/chat/completions", asked)
    assert status == 200, whole
    [choice] = whole["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    *events, last = server.stream("/v1/chat/completions", **asked, stream_options={"include_usage": True})
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == choice["message"]["content"]
    assert last["usage"] == whole["usage"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_a_template_reads_names_and_reasoning(served: Pair, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "{% for m in messages %}{{ m.name }} {{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.tokenizer, "chat_template", said)
    message = {"role": "user", "content": "c" * 9, "name": "n" * 9, "reasoning_content": "r" * 9, "tool_calls": []}
    status, answer = server.ask("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
    assert status == 200, answer
    expected = served.tokenizer(f"{'n' * 9} {'r' * 9}{'c' * 9}", add_special_tokens=False).input_ids
    assert answer["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.seconds
def test_echo_scores_the_prompt_without_new_tokens(pair: Pair, server: Server) -> None:
    answer = server.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=3, temperature=0)
    [choice] = answer["choices"]
    [own] = pair.generate(PROMPT, max_new_tokens=1, prompt_logprobs=3)
    assert choice["text"] == PROMPT
    assert own.prompt_logprobs
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        [one.logprob for one in own.prompt_logprobs], abs=1e-4
    )
    assert "".join(choice["logprobs"]["tokens"]).endswith(PROMPT)
    tokens, offsets = choice["logprobs"]["tokens"][1:], choice["logprobs"]["text_offset"][1:]
    assert all(PROMPT[at:].startswith(token) for token, at in zip(tokens, offsets, strict=True)), "<bos> is not in it"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [[1], "x"], "n": 0}, "n"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_k": 1.5}, "top_k"),
        ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logprobs": 99}, "logprobs"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x", "temprature": 1}, "temprature"),
        ({"prompt": "x", "model": "other"}, "model"),
        ({"prompt": "x", "seed": True}, "seed"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x", "temperature": float("inf")}, "temperature"),
    ],
)
def test_a_wrong_field_is_named(server: Server, body: dict[str, object], param: str) -> None:
    status, answer = server.ask("/v1/completions", body)
    assert status in {400, 404}, answer
    assert answer["error"]["param"] == param, answer


def test_what_is_no_request_is_refused_and_ends_nothing(server: Server) -> None:
    for raw in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**5, b'{"prompt": NaN}', b'{"prompt": {"a": ["b"]}}'):
        status, answer = server.ask("/v1/completions", raw=raw)
        assert status == 400, raw[:20]
        assert answer["error"]["message"]
    assert server.ask("/v1/completions", raw=b" " * (9 << 20))[0] == 413
    assert server.ask("/v1/nothing")[0] == 404
    assert server.ask("/v1/completions")[0] == 405
    for junk in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(9000)) + b"\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(junk)
            assert b" 400 " in connection.recv(100)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
    assert server.ask("/health") == (200, {"status": "ok"})
    assert server.complete(prompt="x", max_tokens=2)["choices"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_frees_its_rows(server: Server, streams: bool) -> None:
    connection = server.connect()
    body = {"prompt": PROMPT, "max_tokens": 1900, "n": 6, "ignore_eos": True, "stream": streams}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    wait_for(lambda: server.inbox.num_running == 4)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_for(lambda: server.inbox.is_empty)


@pytest.mark.seconds
def test_rows_decode_between_chunks_of_a_text_that_is_scored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row has the text, and the scores have every bit, that they have alone."""
    done: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any, **named: Any) -> Any:
            done.append(name)
            return work(*given, **named)

        return note

    monkeypatch.setattr(engine, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(likelihoods, "_figures", noted("chunk", likelihoods._figures))
    monkeypatch.setattr(Round, "step", noted("round", Round.step))
    decoded: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "seed": 7}
    scored: dict[str, Any] = {"prompt": PROMPT * 7, "max_tokens": 0, "echo": True, "logprobs": 2}
    alone = [server.complete(**asked)["choices"] for asked in (decoded, scored)]
    num_chunks = done.count("chunk")
    assert num_chunks > 5
    done.clear()
    with ThreadPoolExecutor(1) as pool:
        row = pool.submit(server.complete, **decoded)
        wait_for(lambda: "round" in done)
        scores = server.complete(**scored)["choices"]
        assert [row.result()["choices"], scores] == alone
    places = [place for place, name in enumerate(done) if name == "chunk"]
    assert [done[first + 1 : then] for first, then in pairwise(places)] == [["round"]] * (num_chunks - 1)


@pytest.mark.seconds
def test_scores_wait_for_no_later_request(pair: Pair) -> None:
    ended = []
    with serving(pair, batch_size=1) as server, ThreadPoolExecutor(4) as pool:

        def ask(name: str, **body: object) -> None:
            server.complete(prompt=PROMPT, ignore_eos=True, **body)
            ended.append(name)

        pool.submit(ask, "long", max_tokens=200)
        wait_for(lambda: server.inbox.num_running == 1)
        for number, name in enumerate(("scored", "second", "third")):
            pool.submit(ask, name, max_tokens=9, **({"logprobs": 1} if name == "scored" else {}))
            wait_for(lambda number=number: server.inbox.num_waiting == number + 1)  # type: ignore[misc]
    assert ended == ["long", "scored", "second", "third"]


@pytest.mark.seconds
def test_connections_that_send_or_read_too_slowly_are_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of headers, the first ones or behind an answer, of a body and of an answer; others go on being served."""
    monkeypatch.setattr(http, "_READ_S", 0.9)
    half = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
    rude = json.dumps({"prompt": PROMPT * 100, "echo": True, "n": 64, "max_tokens": 1}).encode()  # 160 kB
    with serving(pair) as server, ExitStack() as opened:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        silent, headers, behind, body, reader = connections = [opened.enter_context(socket.socket()) for _ in range(5)]
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.connect(("127.0.0.1", server.port))
        behind.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        body.sendall(half + b"host: localhost\r\n\r\n{")
        reader.sendall(half.replace(b"99", b"%d" % len(rude)) + b"host: localhost\r\n\r\n" + rude)
        wait_for(lambda: behind.recv(1000).endswith(b"}"))
        closed = set[socket.socket]()

        def is_over() -> bool:
            for connection in {headers, behind} - closed:
                try:
                    connection.sendall(b"x")
                except OSError:
                    closed.add(connection)
            assert server.ask("/health")[0] == 200
            time.sleep(0.1)
            return len(closed) == 2

        headers.sendall(half)
        wait_for(is_over)
        assert silent.recv(100) == b""
        assert b" 408 " in body.recv(100)
        wait_for(lambda: bool(select.select([reader], [], [], 0)[0]))  # the answer begins
        time.sleep(3)
        assert len(b"".join(iter(partial(reader.recv, 1 << 16), b""))) < 50_000


@pytest.mark.seconds
def test_a_full_queue_a_key_and_the_end(pair: Pair, tmp_path: Path) -> None:
    """A full queue asks to come back; requests without the key are refused; a signal gives up what takes too long."""
    (tmp_path / "key").write_text("secret\n")
    task = ServeConfig(port=0, max_waiting=1, api_key_file=str(tmp_path / "key"))
    with serving(pair, batch_size=1, drain_s=0.5, task=task) as server:
        body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
        assert server.ask("/v1/completions", body)[0] == 401
        assert server.ask("/v1/models", key="secre")[0] == 401
        assert [server.ask("/v1/models", key="secret", scheme=name)[0] for name in ("bearer", "Basic")] == [200, 401]
        assert server.ask("/health")[0] == 200
        with ThreadPoolExecutor(2) as pool:
            long = [pool.submit(server.ask, "/v1/completions", body, key="secret")]
            wait_for(lambda: server.inbox.num_running == 1)
            long.append(pool.submit(server.ask, "/v1/completions", body, key="secret"))
            wait_for(lambda: (server.inbox.num_running, server.inbox.num_waiting) == (1, 1))
            status, answer = server.ask("/v1/completions", body, key="secret")
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
            _, page = server.ask("/metrics", key="secret")
            assert "llama_ssp_running 1.0" in page
            assert "llama_ssp_waiting 1.0" in page
            server.session.stop_request.requested = True
            assert [one.result()[0] for one in long] == [503, 503]


@pytest.mark.seconds
def test_a_slow_reader_keeps_nobody_waiting(server: Server) -> None:
    body = {"prompt": PROMPT * 100, "echo": True, "stream": True, "n": 64, "max_tokens": 1}  # 160 kB
    size = server.listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with closing(server.connect()) as slow, closing(socket.socket()) as slow.sock:
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        slow.sock.connect(("127.0.0.1", server.port))
        slow.request("POST", "/v1/completions", json.dumps(body), JSON)
        wait_for(lambda: server.inbox.num_running > 0)
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        wait_for(lambda: server.inbox.is_empty)
        assert server.complete(prompt="x", max_tokens=2)["choices"]


@pytest.mark.parametrize("num_tokens", [24, 72])
def test_http_wakes_for_streams_at_each_round_and_for_others_seldom(
    num_tokens: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the wait, the first token, each 32 rounds, and the end; the text is the same."""
    wakes, call = list[str](), asyncio.BaseEventLoop.call_soon_threadsafe

    def counted(
        loop: asyncio.BaseEventLoop, callback: Callable[..., object], *given: Any, **how: Any
    ) -> asyncio.Handle:
        wakes.append(getattr(callback, "__name__", ""))
        return call(loop, callback, *given, **how)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", counted)
    asked = {"prompt": PROMPT, "max_tokens": num_tokens, "seed": 3, "ignore_eos": True, "speculative": False}
    whole = server.complete(**asked)["choices"][0]["text"]
    assert wakes.count("put_nowait") == 3 + (num_tokens - 2) // 32
    wakes.clear()
    streamed = server.stream("/v1/completions", **asked)
    assert "".join(event["choices"][0]["text"] for event in streamed if event["choices"]) == whole
    assert wakes.count("put_nowait") == 1 + num_tokens


def test_requests_have_a_time_limit_and_pages_of_one_origin_may_ask(pair: Pair, server: Server) -> None:
    """A request that takes too long ends with status 504, or with an event."""
    origin = "http://localhost:3000"
    long: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "n": 4, "ignore_eos": True}

    def allowed(server: Server, asking: str) -> str | None:
        with closing(server.connect()) as connection:
            connection.request("GET", "/v1/models", headers={"origin": asking})
            return connection.getresponse().getheader("access-control-allow-origin")

    assert allowed(server, origin) is None
    with serving(pair, task=ServeConfig(port=0, request_s=0.2, allow_origin=origin)) as limited:
        assert [allowed(limited, asking) for asking in (origin, "http://elsewhere")] == [origin, None]
        status, answer = limited.ask("/v1/completions", long)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        status, text = limited.ask("/v1/completions", {**long, "stream": True})
        assert status == 200
        assert json.loads(text.rstrip().rpartition("data: ")[2])["error"]["code"] == "timeout"
        wait_for(lambda: limited.inbox.is_empty)


ODD_NUMBERS: list[object] = [
    0,
    -0.0,
    1,
    -1,
    0.5,
    3,
    1e-323,
    1e-40,
    1e-6,
    1e-7,
    0.01,
    0.0099,
    100,
    100.1,
    128,
    1e4,
    -1e4,
    10_001,
    1e39,
    -1e39,
    1e60,
    1e300,
    1e308,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**70,
    -(2**63),
    10**400,
    True,
    "1",
    [],
    {},
    [0.5],
    float("inf"),
    float("-inf"),
    float("nan"),
]
NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "n",
    "seed",
    "max_tokens",
    "logprobs",
    "logit_bias",
    "prompt",
)
ODD_TEXTS: list[dict[str, object]] = [
    {"\ud800": 1},
    {"model": "\ud800"},
    {"stop": ["\ud800"]},
    {"stop": "\0"},
    {"user": "\ud800"},
    {"prompt": ""},
    {"suffix": "\ud800"},
    {"stream_options": {"\ud800": True}, "stream": True},
    {"logit_bias": {"\ud800": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"\u0661": 1}},
    {"prompt": [[]]},
    {"prompt": [""]},
    {"tools": [{}]},
]


def odd_bodies() -> list[dict[str, object]]:
    """Each number at its bounds and beyond, alone at two temperatures and beside another odd one; odd texts."""
    chosen = random.Random(5)
    given: dict[str, Callable[[object], object]] = {"logit_bias": lambda one: {"5": one}, "prompt": lambda one: [one]}
    bodies: list[dict[str, object]] = [*ODD_TEXTS]
    for name, number in product(NUMBERS, ODD_NUMBERS):
        other, value = chosen.choice(NUMBERS[:7]), chosen.choice(ODD_NUMBERS[:28])
        one = {name: given[name](number) if name in given else number}
        bodies += [{"temperature": 1, **one}, {"temperature": 0, other: value, **one}]
    return [{"prompt": "a", "max_tokens": 2, **body} for body in bodies]


@pytest.mark.parametrize("every", [slow(1), heavy(5)])
def test_a_thousand_odd_bodies_are_answered_or_refused(pair: Pair, server: Server, every: int) -> None:
    """None harms the server: it then has the texts that it had before. One in five have each odd number."""
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "seed": 3, "temperature": 0.8}
    [wanted] = pair.generate(PROMPT, max_new_tokens=20, seed=3, temperature=0.8)
    bodies = odd_bodies()
    assert len(bodies) > 1000 - len(ODD_TEXTS)
    bodies = [*bodies[: len(ODD_TEXTS)], *bodies[len(ODD_TEXTS) :: every]]
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda body: server.ask("/v1/completions", body), bodies)]
    wrong = [
        (body, status, answer)
        for body, (status, answer) in zip(bodies, found, strict=True)
        if status != 200 and not 400 <= status < 500
    ]
    assert wrong == []
    assert {status for status, _ in found} >= {200, 400}
    assert all(answer["error"]["message"] for status, answer in found if status != 200)
    assert server.complete(**asked)["choices"][0]["text"] == wanted.text


@pytest.fixture
def _top_k_7_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with top_k=7 have probabilities that are NaN, and prompts with token 7 find no memory."""

    def of(sampling: SamplingConfig | None) -> list[float]:
        settings = settings_of(sampling)
        return [math.nan, *settings[1:]] if sampling and sampling.top_k == 7 else settings

    monkeypatch.setattr(state, "settings_of", of)
    read = Round.prefill

    def prefill(self: Round, executor: Any, batch: Any, prompts: Any, *given: Any, **how: Any) -> None:
        read(self, executor, batch, prompts, *given, **how)
        if (prompts.tokens_BS[:, 0] == 7).any():
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Round, "prefill", prefill)


@pytest.mark.seconds
@pytest.mark.usefixtures("_top_k_7_is_nan")
@pytest.mark.parametrize(
    ("wrong", "said"), [({"top_k": 7}, "token 1: logits became NaN"), ({"prompt": [7, 8, 9]}, "out of memory")]
)
def test_a_request_that_fails_ends_alone(pair: Pair, server: Server, wrong: dict[str, Any], said: str) -> None:
    """Its answer is an error, in a stream an event; its neighbours have their texts, and later ones in its row."""
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.9}
    own = [pair.generate(PROMPT, max_new_tokens=20, seed=seed, temperature=0.9)[0].text for seed in range(8)]
    bodies = [asked | ({"seed": place // 2} if place % 2 else wrong | {"n": 2}) for place in range(16)]
    with ThreadPoolExecutor(16) as pool:
        found = [*pool.map(lambda body: server.ask("/v1/completions", body), bodies)]
    assert [status for status, _ in found] == [500, 200] * 8
    assert [answer["choices"][0]["text"] for _, answer in found[1::2]] == own
    for _, answer in found[::2]:
        assert answer["error"]["type"] == "server_error"
        assert said in answer["error"]["message"]
    status, text = server.ask("/v1/completions", asked | wrong | {"stream": True})
    assert status == 200
    assert said in json.loads(text.rstrip().rpartition("data: ")[2])["error"]["message"]
    wait_for(lambda: server.inbox.is_empty)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ("completions", {"stream": True, "stream_options": {"include_prompt": True}}, "stream_options"),
        ("chat/completions", {"chat_template_kwargs": {"think": True}}, "chat_template_kwargs"),
        ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("chat/completions", {"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
        ("chat/completions", {"messages": [{"role": "cook", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "thief", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "\ud800", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "name": "\ud800"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}, "messages"),
        ("chat/completions", {"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
        ("completions", {"\ud800": 1}, "\ud800"),
        ("completions", {"prompt": ["x"] * 257}, "prompt"),
        ("completions", {"prompt": ["x", "y", "z"], "n": 128}, "n"),
    ],
)
def test_what_would_have_no_effect_is_named_and_no_path_is_shown(
    server: Server, path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{# think #}{% set think = 1 %}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    for role, does in (("cook", "raise_exception('no')"), ("thief", "messages[1].role.x")):
        template += f"{{% if messages[0].role == '{role}' %}}{{{{ {does} }}}}{{% endif %}}"
    tokenizer = server.session.models.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", template)
    asked = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    status, answer = server.ask(f"/v1/{path}", {**asked, "max_tokens": 2, **body})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert tokenizer.name_or_path not in answer["error"]["message"]
    assert server.ask(f"/v1/{path}", {**asked, "max_tokens": 2})[0] == 200


def test_a_prompt_that_no_tokens_could_make_short_enough_is_not_encoded(
    served: Pair, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", "{{ messages[0].content }}")
    monkeypatch.setattr(type(served.tokenizer), "__call__", None)
    text = "  " * (2 << 20)
    for path, body in (("completions", {"prompt": ["x" * 10**6]}), ("completions", {"prompt": text})):
        status, answer = server.ask(f"/v1/{path}", body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    status, answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "messages")


@pytest.mark.seconds
def test_the_longest_tokens_fill_the_context(pair: Pair, server: Server) -> None:
    """The bound of bytes refuses no prompt that fits."""
    longest = max(pair.tokenizer.get_vocab(), key=lambda token: len(pair.tokenizer.convert_tokens_to_string([token])))
    text = pair.tokenizer.convert_tokens_to_string([longest]) * 2000
    assert len(pair.tokenizer(text).input_ids) in range(1900, 2047)
    assert server.complete(prompt=text, max_tokens=1)["usage"]["prompt_tokens"] > 1900


def test_a_method_that_a_path_lacks_is_answered_with_those_that_it_has(server: Server) -> None:
    for method, path, allowed in (("GET", "/v1/completions", {"POST"}), ("PUT", "/v1/models", {"GET", "HEAD"})):
        with closing(server.connect()) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            assert (answer.status, {*answer.headers["allow"].split(", ")}) == (405, allowed)


def test_clients_of_a_server_that_fails_get_an_error_in_json(pair: Pair) -> None:
    task = ServeConfig(port=0)
    session: Any = SimpleNamespace(
        config=replace(pair.config, task=task), models=pair.models, world=pair.world, plan=None
    )
    inbox = Inbox(task.max_waiting)
    with ThreadPoolExecutor(1) as pool:
        with suppress(LostRankError), Front(session, inbox) as front:
            server = Server(int(front.address.rpartition(":")[2].partition("/")[0]), inbox, session, front._socket)
            asked = pool.submit(server.ask, "/v1/completions", {"prompt": PROMPT})
            wait_for(lambda: inbox.num_waiting == 1)
            raise LostRankError("rank 1 is missing")
        status, answer = asked.result(timeout=20)
    assert (status, answer["error"]["type"]) == (503, "server_error")


@pytest.mark.heavy
def test_idle_connections_stay_open_as_long_as_the_page_says(pair: Pair) -> None:
    """Only what closes silent ones, after 30 to 60 s, ends them."""
    with serving(pair) as server, closing(server.connect()) as connection:
        for idle_s in (0.0, 6.0):
            time.sleep(idle_s)
            connection.request("GET", "/health")
            assert connection.getresponse().read()


def test_the_second_interrupt_ends_what_runs(pair: Pair) -> None:
    with serving(pair, drain_s=600.0) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
        long = pool.submit(server.ask, "/v1/completions", body)
        wait_for(lambda: server.inbox.num_running == 1)
        server.session.stop_request.requested = True
        server.session.stop_request.num_interrupts = 1
        time.sleep(0.2)
        assert not long.done()
        server.session.stop_request.num_interrupts = 2
        assert long.result(timeout=5)[0] == 503


def test_more_tokens_than_the_context_has_are_refused(pair: Pair) -> None:
    config = replace(pair.config, task=ServeConfig(max_length=100_000))
    sentence = "task.max_length=100000 is more than the context of model=tiny: at most 2048 is possible"
    with pytest.raises(ConfigError, match=sentence):
        length_of(config, 2048)
    assert sentence in [*SERVE.problems(config, frozenset())]
    assert length_of(replace(pair.config, task=ServeConfig(max_length=2048)), 2048) == 2048

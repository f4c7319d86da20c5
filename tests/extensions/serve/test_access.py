"""Who may ask a server, how clients take turns, and how connections end."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import Pair, load
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.serve.access import read_keys
from llama_ssp.extensions.serve.inbox import ClientId, Inbox, ServedRequest
from llama_ssp.extensions.serve.records import ServeConfig
from tests.extensions.serve.server import JSON, PROMPT, Server, serving
from tests.helpers.disturbed import wait_for

pytestmark = pytest.mark.seconds
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


def status(server: Server, **headers: str) -> int:
    """The status of a request of one token with these headers in place of or next to the usual ones."""
    connection = server.connect()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/v1/completions", BODY, JSON | named)
    found = connection.getresponse().status
    connection.close()
    return found


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "127.9.9.9"}, 200),
        ({"host": "Friend.example:80"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"host": ""}, 421),
        ({"host": "[::1"}, 421),
        ({"host": "10.0.0.1"}, 421),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000", "host": "localhost:8000"}, 403),
        ({"content_type": "application/json; charset=utf-8"}, 200),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": ""}, 415),
    ],
)
def test_a_page_of_a_stranger_cannot_ask(open_server: Server, headers: dict[str, str], expected: int) -> None:
    assert status(open_server, **headers) == expected


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    with serving(load("tiny", "tiny-draft"), task=ServeConfig(port=0, hosts=["friend.example"])) as server:
        yield server


def turns(ask: Callable[[int, str], Any], *, alone: str) -> int:
    """The place at which the one request of a client ends, after 40 of another one that came first."""
    ended = list[str]()

    def one(place: int, name: str) -> None:
        ask(place, name)
        ended.append(name)

    with ThreadPoolExecutor(41) as pool:
        for place in range(41):
            pool.submit(one, place, "many" if place < 40 else alone)
    assert len(ended) == 41
    return ended.index(alone)


@pytest.mark.parametrize("kind", ["key", "address", "forwarded"])
def test_one_request_ends_among_the_first_four_beside_forty_of_another(pair: Pair, kind: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret-a a\n\nsecret-b b\n")
    task = ServeConfig(port=0, max_waiting=64)
    if kind == "key":
        task.api_key_file = str(tmp_path / "keys")
    if kind == "forwarded":
        task.proxy = "127.0.0.0/8"
    with serving(pair, batch_size=1, task=task) as server:

        def ask(place: int, name: str) -> None:
            if name == "few":
                wait_for(lambda: server.inbox.num_waiting > 30)
            source = ("127.0.0.2" if kind == "address" and name == "few" else "127.0.0.1", 0)
            headers = JSON | {"authorization": f"Bearer secret-{'b' if name == 'few' else 'a'}"}
            if kind == "forwarded":
                headers["x-forwarded-for"] = "10.0.0.9" if name == "few" else "10.0.0.8"
            if kind == "address":  # made up, which nobody believes
                headers |= {"x-forwarded-for": f"10.0.0.{place}", "authorization": f"Bearer {place}"}
            connection = HTTPConnection("127.0.0.1", server.port, timeout=120, source_address=source)
            body = json.dumps({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True})
            connection.request("POST", "/v1/completions", body, headers)
            assert connection.getresponse().status == 200
            connection.close()

        # Those that have ended before the last client came, and the one that has the row, end before it.
        with_first = 41 - 31
        assert turns(ask, alone="few") < with_first + 4
        if kind == "key":
            _, page = server.ask("/metrics", key="secret-b")
            counted = dict(re.findall(r'key_tokens_total{key="(.)",kind="new"} (\S+)', page))
            assert counted == {"a": "1600.0", "b": "40.0"}


def test_keys_take_turns_and_then_the_addresses_of_a_key() -> None:
    inbox = Inbox(64)
    clients = [ClientId("a", "1"), ClientId("b", "1"), ClientId("a", "2")]
    for client, number in zip(clients, (20, 5, 2), strict=True):
        inbox.put([ServedRequest(index=0, prompt_ids=(1,), max_new_tokens=9)] * number, lambda *_: None, client=client)
    numbers = [one.index for one in inbox.take(12, wait_s=0)[0]]
    names = ["a1" if number < 20 else "b1" if number < 25 else "a2" for number in numbers]
    assert sorted(names[:2]) == ["a1", "b1"]
    assert sorted(names[:8]) == ["a1"] * 2 + ["a2"] * 2 + ["b1"] * 4


@pytest.mark.parametrize("text", ["", "\n\n", "a x\na y\n", "a x\nb x\n", "a key2\nb\n"])
def test_keys_and_their_names_are_one_each(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=r"api_key_file=.*keys"):
        read_keys(ServeConfig(api_key_file=str(tmp_path / "keys")))
    (tmp_path / "keys").write_text("a\n\nb mine and more\n")
    assert read_keys(ServeConfig(api_key_file=str(tmp_path / "keys"))) == {b"a": "key1", b"b": "mine"}


def exchange(server: Server, request: bytes, *, shuts: bool = False) -> bytes:
    """All bytes that a server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        if shuts:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def test_nothing_is_read_behind_a_request_with_two_lengths(open_server: Server) -> None:
    """Source: RFC 9112, section 6.1."""
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    second = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    found = exchange(open_server, HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n" + chunked + second)
    assert found.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in found.lower()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_shuts_its_sending_half_gets_its_answer(open_server: Server, streams: bool) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "stream": streams, "n": 6}).encode()
    found = exchange(open_server, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body, shuts=True)
    assert b"HTTP/1.1 200 OK" in found
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if streams else b"}")
    assert exchange(open_server, HEAD + b"content-length: 99\r\n\r\n{", shuts=True) == b""


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_while_it_waits_is_noticed_and_counted(pair: Pair, streams: bool) -> None:
    with serving(pair, batch_size=1) as server, ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.complete, prompt=PROMPT, max_tokens=1900, ignore_eos=True)
        wait_for(lambda: server.inbox.num_running == 1)
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "stream": streams}), JSON)
        wait_for(lambda: server.inbox.num_waiting == 1)
        connection.sock.close()
        wait_for(lambda: server.inbox.num_waiting == 0)
        assert not long.done()
        server.session.stop_request.requested = True
        wait_for(lambda: 'errors_total{status="499"} 1.0' in server.ask("/metrics")[1])


def test_dashboards_find_the_names_of_vllm(open_server: Server) -> None:
    open_server.complete(prompt="x", max_tokens=3, ignore_eos=True)
    _, page = open_server.ask("/metrics")
    labels = '{engine="0",model_name="tiny"'
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token", "request_queue_time"):
        assert float(re.search(rf"vllm:{name}_seconds_count{labels}}} (\S+)", page)[1]) >= 1  # type: ignore[index]
    counted = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    for name in counted:
        assert re.search(rf"vllm:{name}{{[^}}]*}} [1-9]", page), name
    assert 'finished_reason="length"' in page

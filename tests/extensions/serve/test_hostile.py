"""Requests that ask for much work are answered or refused by a sentence, and a client beside them does not wait."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from llama_ssp import Pair, load
from tests.extensions.serve.server import JSON, serving
from tests.extensions.serve.test_distributed import serving as serving_on
from tests.helpers.extensions import need
from tests.helpers.lanes import first

Ask = Callable[[dict[str, Any], float], tuple[int, Any]]
WAITS_S = 30.0
"""A client of one token waited 140 s; on a quiet machine it waits less than one."""


def optional(number: int, name: str = "property") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{name}_{one}": {"type": "integer"} for one in range(number)}}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


WORDS = [f"w{number * 7919 % 100003}" for number in range(20000)]
HOSTILE: dict[str, list[tuple[dict[str, Any], set[int]]]] = {
    "six large schemas": [({"guided_json": optional(5000, f"p{one}")}, {400, 429}) for one in range(6)],
    "500 optional properties": [({"guided_json": optional(500)}, {200})],
    "2000 optional properties": [({"guided_json": optional(2000)}, {400})],
    "repetitions": [({"guided_regex": regex}, {200}) for regex in ("a{65535}", "(a?){1000}a{1000}", "[ab]a{60000}")],
    "a repetition beyond all limits": [({"guided_regex": "(a{1,65535}b){1,65535}c{65535}"}, {200, 400})],
    "a long choice": [({"guided_choice": ["x" * 200_000]}, {200}), ({"guided_choice": WORDS}, {200})],
    "many words": [({"guided_grammar": "start: " + " | ".join(f'"{word}"' for word in WORDS[:15000])}, {200, 400})],
    "depth": [({"guided_json": nested(100)}, {200}), ({"guided_json": {"$ref": "#"}}, {400})],
    "a pattern that quotes ends of calls": [
        ({"guided_json": {"type": "string", "pattern": "^(</tool_call>){200}$"}}, {200})
    ],
    "a product of choices": [
        ({"guided_json": {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(40)]}}, {200, 400})
    ],
    "log-probabilities": [({"logprobs": 20, "n": 4, "max_tokens": 200, "ignore_eos": True}, {200})],
}


def check(ask: Ask, kind: str) -> None:
    """Send the requests of a kind, and requests of one token meanwhile, which are answered in time."""
    need("grammars")
    plain = {"prompt": "x", "max_tokens": 1, "temperature": 0}
    with ThreadPoolExecutor(len(HOSTILE[kind])) as pool:
        sent = [
            (pool.submit(ask, {"prompt": "x", "max_tokens": 16, "seed": 1} | body, 120.0), statuses)
            for body, statuses in HOSTILE[kind]
        ]
        for _ in range(3):
            assert ask(plain, WAITS_S)[0] == 200
        for request, statuses in sent:
            status, answer = request.result()
            if status == 429 and 429 not in statuses:  # another large structure is still being prepared
                continue
            assert status in statuses, answer
            if status != 200:
                assert "refused" in answer["error"]["message"] or "prepare" in answer["error"]["message"]
    assert ask(plain, WAITS_S)[0] == 200


def asking(port: int) -> Ask:
    def ask(body: dict[str, Any], timeout_s: float) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        return answer.status, content

    return ask


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load("tiny", "tiny-draft")


@pytest.fixture(scope="module")
def ask(pair: Pair) -> Iterator[Ask]:
    with serving(pair) as server:
        yield asking(server.port)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", first(list(HOSTILE)))
def test_a_client_of_one_token_does_not_wait_for_them(ask: Ask, kind: str) -> None:
    check(ask, kind)


@pytest.mark.slow
def test_nor_on_two_ranks_whose_memory_does_not_grow(tmp_path: Path) -> None:
    """Kept structures are few: a second time takes no more than the first."""
    with serving_on(2, tmp_path / "run") as (process, address):
        memory = []
        for _ in range(2):
            for kind in HOSTILE:
                check(asking(urlsplit(address).port or 0), kind)
            memory.append(resident_bytes(process.pid))
    assert memory[1] < 1.1 * memory[0]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and of those that it has started."""
    own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    children = "".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return own + sum(resident_bytes(int(child)) for child in children)


@pytest.mark.seconds
def test_a_structure_that_fails_unexpectedly_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the decoder's threads, where it had been prepared at its arrival: a rank may lack the memory."""
    need("grammars")
    from llama_ssp.extensions.serve import service

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(service, "prepare_constraint", fail)
    with serving(load("tiny")) as server:
        status, answer = server.ask("/v1/completions", {"prompt": "x", "guided_regex": "a", "max_tokens": 2})
        assert (status, answer["error"]["message"]) == (500, "the structure of the text could not be prepared")
        assert server.complete(prompt="x", max_tokens=2)["choices"]

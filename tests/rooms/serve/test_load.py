"""Many clients at once: nothing is lost, no text is another one, and memory does not grow."""

import gc
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from llama_ssp import load
from llama_ssp.ranks.memory import anonymous_bytes
from tests.helpers.disturbed import wait_for
from tests.helpers.lanes import heavy, slow
from tests.rooms.serve.server import Server, serving

PROMPTS = ("def factorial(n):\n", "import os\n", "class Stack:\n", "for i in range(", "x = [")
OWN: tuple[dict[str, Any], ...] = (
    {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3},
    {"logit_bias": {"5": 2.5}}, {"temperature": 0},
)  # fmt: skip
_MIB, _WARM_S = 1 << 20, 120
"""After so long, rounds of all kinds have been traced, which takes memory once."""


def bodies() -> list[dict[str, Any]]:
    """Kinds of requests: a third without drafts, a fifth with settings of their own."""
    return [
        {"prompt": PROMPTS[number % 5], "max_tokens": 4 + number % 13, "seed": number, "temperature": 0.9,
         **({"speculative": False} if number % 3 == 0 else {}), **(OWN[number // 5 % 7] if number % 5 == 0 else {})}
        for number in range(105)
    ]  # fmt: skip


def ask_and_leave(server: Server, body: dict[str, Any]) -> None:
    """Ask for a long stream, and go after its first bytes."""
    with closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | {"max_tokens": 400, "stream": True}))
        connection.getresponse().read(20)


@pytest.mark.parametrize(("num_clients", "seconds"), [heavy(16, 15), slow(64, 150)])
def test_nothing_is_lost_under_load_and_memory_stays(num_clients: int, seconds: int) -> None:
    """One request in twenty is cancelled; each text is the one that its request has alone."""
    asked, counts, lock = bodies(), Counter[str](), threading.Lock()
    with serving(load("tiny", "tiny-draft"), batch_size=16) as server, ThreadPoolExecutor(num_clients) as pool:
        wanted = [server.complete(**body)["choices"][0]["text"] for body in asked]
        wrong: list[Any] = []
        bytes_at: list[int] = []
        ends_s = time.monotonic() + seconds

        def client(number: int) -> None:
            chosen = random.Random(number)
            while time.monotonic() < ends_s:
                place = chosen.randrange(len(asked))
                if is_cancelled := chosen.random() < 0.05:
                    ask_and_leave(server, asked[place])
                else:
                    status, answer = server.ask("/v1/completions", asked[place])
                    if status != 200 or answer["choices"][0]["text"] != wanted[place]:
                        wrong.append((asked[place], status, answer))
                with lock:
                    counts["cancelled" if is_cancelled else "whole"] += 1

        running = [pool.submit(client, number) for number in range(num_clients)]
        for part in (0.3, 0.6, 0.95):
            time.sleep(max(ends_s - seconds * (1 - part) - time.monotonic(), 0))
            gc.collect()
            bytes_at.append(anonymous_bytes() or 0)
        for each in running:
            each.result()
        wait_for(lambda: server.inbox.is_empty)
        assert wrong == []
        assert counts["whole"] > num_clients
        assert counts["cancelled"] > 0
        _, page = server.ask("/metrics")
        assert "llama_ssp_running 0.0" in page
        assert "llama_ssp_waiting 0.0" in page
        if seconds >= _WARM_S:
            assert bytes_at[2] - bytes_at[1] < 64 * _MIB, [each // _MIB for each in bytes_at]
        assert [server.complete(**body)["choices"][0]["text"] for body in asked[:9]] == wanted[:9]

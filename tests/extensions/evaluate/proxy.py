"""A proxy before a server, which changes what it is asked or what it answers, and may lose connections."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.extensions.serve.server import Server

NUM_TOKENS = 512
"""The vocabulary of the servers' model."""
Body = dict[str, Any]
Ask = Callable[[Body], Body]
Fault = Callable[[Body, Ask], Body]
"""Answers a body, with what asks the server behind the proxy."""


def honest(body: Body, ask: Ask) -> Body:
    return ask(body)


def with_settings(change: Callable[[Body], Body]) -> Fault:
    """The server samples with other settings than it is asked for."""
    return lambda body, ask: ask(change(body))


def without(name: str) -> Fault:
    return with_settings(lambda body: {key: value for key, value in body.items() if key != name})


def with_temperature(change: Callable[[float], float]) -> Fault:
    return with_settings(lambda body: body | {"temperature": change(body["temperature"])})


def with_seed(change: Callable[[int], int]) -> Fault:
    return with_settings(lambda body: body | {"seed": change(body.get("seed", 0))})


def cooler(body: Body, ask: Ask) -> Body:
    return ask(body | {"temperature": 0.9 * body["temperature"]})


def hotter_log_probs(body: Body, ask: Ask) -> Body:
    """Log-probabilities of temperature 1.25, but for the sum of their probabilities."""
    answer = ask(body)
    for choice in answer["choices"]:
        if found := choice.get("logprobs"):
            found["token_logprobs"] = [0.8 * value for value in found["token_logprobs"]]
            found["top_logprobs"] = [{key: 0.8 * one for key, one in top.items()} for top in found["top_logprobs"]]
    return answer


def off_by_one_at_the_end(context: int) -> Fault:
    """The last position of the context has the law of the position before."""

    def answer(body: Body, ask: Ask) -> Body:
        prompt, num = body["prompt"], body["max_tokens"]
        if len(prompt) + num < context:
            return ask(body)
        found = ask(body | {"max_tokens": num - 1})
        ids = found["choices"][0]["token_ids"]
        last = ask(body | {"prompt": [*prompt, *ids[:-1]], "max_tokens": 1, "seed": body.get("seed", 0) + 12345})
        ids += last["choices"][0]["token_ids"]
        return found

    return answer


def hotter_first_token(body: Body, ask: Ask) -> Body:
    """The first token of each text is drawn at 1.3 times the temperature."""
    first = ask(body | {"max_tokens": 1, "temperature": 1.3 * body["temperature"], "seed": body.get("seed", 0) + 12345})
    ids, num = first["choices"][0]["token_ids"], body["max_tokens"]
    if num == 1 or first["choices"][0]["finish_reason"] == "stop" or body["temperature"] == 0:
        return first if body["temperature"] else ask(body)
    found = ask(body | {"prompt": [*body["prompt"], *ids], "max_tokens": num - 1})
    return _joined(first, found)


def _joined(first: Body, found: Body) -> Body:
    """Two answers as one, whose second goes on where the first ends."""
    [before], [after] = first["choices"], found["choices"]
    after["token_ids"] = before["token_ids"] + after["token_ids"]
    after["text"] = before["text"] + after["text"]
    for name, values in (after.get("logprobs") or {}).items():
        if isinstance(values, list):
            after["logprobs"][name] = before["logprobs"][name] + values
    found["usage"]["prompt_tokens"] -= len(before["token_ids"])
    return found


def banning(token: int) -> Fault:
    return with_settings(lambda body: body | {"logit_bias": {str(token): -100, **body.get("logit_bias", {})}})


def stopping_late(body: Body, ask: Ask) -> Body:
    """One token more than a stop ends is drawn, and counted."""
    answer = ask(body)
    if body.get("stop"):
        [choice], ids = answer["choices"], answer["choices"][0]["token_ids"]
        whole = ask({key: value for key, value in body.items() if key != "stop"})["choices"][0]["token_ids"]
        choice["token_ids"] = whole[: len(ids) + 1]
    return answer


def stopping_early(body: Body, ask: Ask) -> Body:
    """A stop takes one character more off the text."""
    answer = ask(body)
    if body.get("stop"):
        answer["choices"][0]["text"] = answer["choices"][0]["text"][:-1]
    return answer


def other_tokens(body: Body, ask: Ask) -> Body:
    """The texts of another model."""
    answer = ask(body)
    for choice in answer["choices"]:
        choice["token_ids"] = [(7 * token + 1) % NUM_TOKENS for token in choice["token_ids"]]
        choice["logprobs"] = None
    return answer


def texts_alone(body: Body, ask: Ask) -> Body:
    """A server that knows of no token ids."""
    answer = ask({key: value for key, value in body.items() if not key.startswith("return_")} | {"logprobs": None})
    for choice in answer["choices"]:
        choice["logprobs"] = None
    return answer


@contextmanager
def proxy(server: Server, fault: Fault = honest, *, loses: float = 0.0) -> Iterator[tuple[str, list[Body]]]:
    """The address of a proxy, and all bodies that it was asked; `loses` is the share of connections that it loses.

    A third of those are lost before the server behind it is asked, a third after, a third in the middle of the answer.
    """
    draw, asked, lock = random.Random(0), list[Body](), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(*server.ask(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                asked.append(body)
                number = draw.random()
            if number < loses / 3:
                return
            failed: list[tuple[int, Any]] = []

            def ask(one: Body) -> Body:
                status, answer = server.ask(self.path, one)
                if status != 200:
                    failed.append((status, answer))
                    raise ConnectionError
                assert isinstance(answer, dict)
                return answer

            try:
                found = (200, fault(body, ask))
            except ConnectionError:
                found = failed[0]
            if number >= loses * 2 / 3:
                self._answer(*found, is_cut=number < loses)

        def _answer(self, status: int, content: object, *, is_cut: bool = False) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[: len(text) // 2] if is_cut else text)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1", asked
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()

"""Asks servers with OpenAI's interface for completions: several at a time, within bounds, each answer once.

A request without an answer (a lost connection, status 429 or 5xx) is repeated; its key keeps it from being counted
twice. Redirections are not followed, so only the hosts that the user has typed get requests.
"""

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.extensions.evaluate.audit.records import KEY
from llama_ssp.types import Parsed

_NUM_TRIES, _LONGEST_WAIT_S, _ANSWER_S = 7, 10.0, 300.0
_LEAST_WAIT_S, _MOST_SAID = 0.05, 200
_REPEATED = {408, 409, 425, 429, 500, 502, 503, 504}


class Ask(NamedTuple):
    """A request: a key of its own, and the fields of its body."""

    key: str
    body: dict[str, Any]


class RefusedError(Exception):
    """Raised for a request that the server understands and refuses, with the server's reason."""


class Bounds:
    """The number of requests and the time that all threads have left; counts repeated requests."""

    def __init__(self, *, requests: int, minutes: float) -> None:
        self._left, self._end_s, self._lock = requests, time.monotonic() + 60 * minutes, threading.Lock()
        self.num_repeated = 0

    @property
    def are_reached(self) -> bool:
        """Whether no more request may be made."""
        return self._left <= 0 or time.monotonic() > self._end_s

    def take(self, *, again: bool) -> bool:
        """Count a request; False if there is none left."""
        with self._lock:
            if self.are_reached:
                return False
            self._left -= 1
            self.num_repeated += again
            return True


class Client:
    """Asks one server."""

    def __init__(self, url: str, bounds: Bounds) -> None:
        parts = urlsplit(url.rstrip("/"))
        self.url, self._parts, self.bounds = url.rstrip("/"), parts, bounds
        self._headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY):
            self._headers["authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Parsed:
        """Return the JSON that the server has at a path."""
        return self._answer("GET", path, None)

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request for completions; raises RefusedError, or ConfigError without a server."""
        found = self._answer("POST", "/completions", json.dumps(body).encode())
        if not (isinstance(found, dict) and isinstance(found.get("choices"), list) and found["choices"]):
            raise ConfigError(f"{self.url}/completions gives no choices: its answer is not of OpenAI's form")
        return found

    def _answer(self, method: str, path: str, content: bytes | None) -> Parsed:
        said = "nothing was asked"
        for number in range(_NUM_TRIES):
            if not self.bounds.take(again=number > 0):
                raise SspError(f"the audit's requests or minutes are used up; last, {said}")
            wait_s = min(_LEAST_WAIT_S * 2**number, _LONGEST_WAIT_S)
            try:
                status, after, text = self._ask(method, path, content)
            except (OSError, http.client.HTTPException) as error:
                said = f"{self.url} does not answer ({type(error).__name__}: {error})"
            else:
                if status == http.HTTPStatus.OK:
                    with suppress(ValueError):
                        return json.loads(text)
                    status, text = 502, b"its answer is no JSON"
                reason = _reason_of(text)
                if status not in _REPEATED:
                    raise _refused(status, reason, url=self.url)
                said = f"{self.url} answers with status {status}: {reason}"
                with suppress(ValueError):
                    wait_s = min(max(wait_s, float(after or 0)), _LONGEST_WAIT_S)
            time.sleep(wait_s)
        raise ConfigError(f"{said}, {_NUM_TRIES} times: start the server, or give its address as http://HOST:PORT/v1")

    def _ask(self, method: str, path: str, content: bytes | None) -> tuple[int, str | None, bytes]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        with closing(kind(self._parts.hostname or "", self._parts.port, timeout=_ANSWER_S)) as connection:
            connection.request(method, self._parts.path + path, content, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("retry-after"), answer.read()


def _refused(status: int, reason: str, *, url: str) -> SspError | RefusedError:
    if status in {401, 403}:
        return ConfigError(f"{url} wants a key ({reason}): set the environment variable {KEY}")
    return RefusedError(f"status {status}: {reason}")


def _reason_of(text: bytes) -> str:
    with suppress(ValueError, AttributeError, TypeError):
        found = json.loads(text)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:_MOST_SAID]
    return text.decode(errors="replace")[:_MOST_SAID]


def answers(
    client: Client, asks: Iterable[Ask], *, concurrency: int, stops: Callable[[], bool]
) -> Iterator[tuple[Ask, dict[str, Any] | RefusedError]]:
    """Yield requests with their answers, as these come; raises the errors of `Client`.

    Once `stops()` is true, no new request starts, and the running ones are waited for. Requests without an answer
    because of a bound of the client are left out.
    """

    def answer(ask: Ask) -> dict[str, Any] | RefusedError:
        try:
            return client.complete(ask.body)
        except RefusedError as error:
            return error

    todo = iter(asks)
    with ThreadPoolExecutor(concurrency) as pool:
        running = {pool.submit(answer, ask): ask for ask in islice(todo, concurrency)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                ask = running.pop(future)
                try:
                    found = future.result()
                except SspError:
                    if client.bounds.are_reached:
                        continue
                    raise
                yield ask, found
                running |= {} if stops() else {pool.submit(answer, other): other for other in islice(todo, 1)}

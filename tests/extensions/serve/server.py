"""A server of a pair, in threads of this process, and a client."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import torch

from llama_ssp import Pair
from llama_ssp.extensions.serve.http import Front
from llama_ssp.extensions.serve.inbox import Inbox
from llama_ssp.extensions.serve.records import ServeConfig, ServeTimeouts, length_of
from llama_ssp.extensions.serve.service import Service
from llama_ssp.speculate.engine.completion import StopRequest

PROMPT = "def factorial(n):\n"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Server:
    """A server that answers on a port of the loopback."""

    port: int
    inbox: Inbox
    session: Any
    listener: socket.socket

    def connect(self) -> HTTPConnection:
        """A connection of its own."""
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, path: str, body: object = None, *, raw: bytes | None = None, key: str = "", scheme: str = "Bearer"
    ) -> tuple[int, Any]:
        """The status and the answer, JSON or text, of a request."""
        connection = self.connect()
        content = json.dumps(body).encode() if raw is None else raw
        method = "GET" if body is raw is None else "POST"
        headers = {"authorization": f"{scheme} {key}", **JSON}
        connection.request(method, path, content if method == "POST" else None, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

    def complete(self, **body: object) -> dict[str, Any]:
        """The answer to a request for completions."""
        status, answer = self.ask("/v1/completions", body)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def stream(self, path: str, **body: object) -> list[Any]:
        """The events of a streamed answer, without the last."""
        status, text = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        *events, done = text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serving(
    pair: Pair, *, batch_size: int = 4, drain_s: float = 5.0, task: ServeConfig | None = None
) -> Iterator[Server]:
    """Serve a pair while the block runs."""
    task = task or ServeConfig(port=0)
    config = replace(pair.config, task=task, batch_size=batch_size)
    config.timeouts = ServeTimeouts(drain_s=drain_s)
    session: Any = SimpleNamespace(
        config=config, models=pair.models, world=pair.world, plan=None, folder=None, stop_request=StopRequest()
    )
    inbox, is_made = Inbox(task.max_waiting), threading.Event()

    def decode() -> None:
        with torch.inference_mode():
            try:
                service = Service(session, inbox, length=length_of(config, pair.models.context))
            finally:
                is_made.set()
            service.run()

    with Front(session, inbox) as front:
        decoding = threading.Thread(target=decode)
        decoding.start()
        is_made.wait()  # it traces, and leaves out warnings, which this thread must not take in meanwhile
        try:
            yield Server(int(front.address.rpartition(":")[2].partition("/")[0]), inbox, session, front._socket)
        finally:
            session.stop_request.requested = True
            decoding.join(60)
            assert not decoding.is_alive()

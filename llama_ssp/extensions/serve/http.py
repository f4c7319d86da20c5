"""`task=serve`: HTTP on rank 0 reads bodies, streams answers, and notices clients that have gone.

It runs in its own thread, and reaches the decoder only through its `Inbox`. Nothing about requests is logged.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from llama_ssp.errors import ConfigError, InterruptedRun
from llama_ssp.extensions.serve.access import Access, Connection, Json, WithKey, client_of, read_keys
from llama_ssp.extensions.serve.inbox import Inbox, Part, RequestError
from llama_ssp.extensions.serve.metrics import GONE, Metrics
from llama_ssp.extensions.serve.protocol import Answer, Asked, BodyReader
from llama_ssp.extensions.serve.records import ServeConfig, ServeTimeouts, length_of
from llama_ssp.extensions.serve.responses import Response as ResponseOf
from llama_ssp.extensions.serve.responses import as_chat
from llama_ssp.extensions.serve.service import Service, check_layout
from llama_ssp.extensions.serve.structures import Structures
from llama_ssp.ranks.failures import raise_on_all_ranks
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session

_T = TypeVar("_T")
_PAGE = ("index.html", "page.css", "page.js")
_OWN_ALONE = {"content-security-policy": "default-src 'self'; frame-ancestors 'none'", "cache-control": "no-cache"}
"""Headers of the page, which loads nothing from elsewhere."""
_OPEN = {"/health", "/favicon.ico", "/", *(f"/{name}" for name in _PAGE)}
"""Paths that need no key."""
_MOST_BYTES, _READ_S, _CLOSE_S, _MOST_OPEN = 8 << 20, 30.0, 5.0, 1024
_MOST_STRUCTURES = 64
"""The most structures of texts that are being prepared or wait for it; more are refused."""
_MOST_KEPT = 32
"""Parts of an answer that HTTP's thread takes at a time if the client sees them only at the end."""


@torch.inference_mode()
def serve(session: Session, _requests: list[PromptRequest]) -> None:
    """Serve until a signal comes, then raise InterruptedRun; the same on every rank; rank 0 answers."""
    comm, inbox, front = session.world.comm, None, None
    check_layout(session, "task=serve")
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            inbox = Inbox(cast("ServeConfig", session.config.task).max_waiting)
            front = Front(session, inbox)
    service = Service(session, inbox, length=length_of(session.config, session.models.context))
    service.warm_up()
    with front or nullcontext():
        if front:
            session.terminal.say(f"serving on {front.address}; Ctrl-C ends it")
        service.run()
    raise InterruptedRun("a signal ended the server")


class Front:
    """The HTTP side of a server; as a context manager, it accepts requests until its `with` block ends.

    Raises ConfigError if its keys cannot be read, or if the address is in use.
    """

    def __init__(self, session: Session, inbox: Inbox) -> None:
        config = session.config
        self._task, self._inbox = cast("ServeConfig", config.task), inbox
        maker, length = session.models.request_maker, length_of(config, session.models.context)
        self._reader = BodyReader(config, maker, length=length, eos_ids=session.models.eos_ids)
        self._metrics, self._structures = Metrics(session, inbox), Structures(_MOST_STRUCTURES)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="log-probabilities")
        self._structure_s = cast("ServeTimeouts", config.timeouts).structure_s
        self._socket, self._created = _listen(self._task), int(time.time())
        allowed = [self._task.allow_origin] if self._task.allow_origin else []
        cors = Middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/completions", partial(self._complete, is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._complete, is_chat=True), methods=["POST"]),
            Route("/v1/responses", self._respond, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            *(Route(f"/{'' if name == _PAGE[0] else name}", _file_of(name)) for name in _PAGE if self._task.page),
            Route("/favicon.ico", lambda _: Response(status_code=204)),
            Route("/health", self._health),
            Route("/metrics", self._count),
        ]
        app = Starlette(
            routes=routes,
            middleware=[
                Middleware(Access, task=self._task),
                *([cors] if allowed else []),
                Middleware(WithKey, keys=read_keys(self._task), open_paths=_OPEN),
            ],
            exception_handlers=dict.fromkeys((RequestError, ClientDisconnect, 404, 405, Exception), self._refuse),
        )
        server = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MOST_OPEN,
            timeout_graceful_shutdown=int(_CLOSE_S),
            timeout_keep_alive=int(2 * _READ_S),
            lifespan="off",
            ws="none",
            http=Connection,
            proxy_headers=self._task.proxy is not None,
            forwarded_allow_ips=self._task.proxy or "",
            callback_notify=self._close_idle,
            timeout_notify=int(_READ_S),
        )
        self._server, self._idle = uvicorn.Server(server), set[tuple[Any, ...]]()
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True, name="http"
        )

    @property
    def address(self) -> str:
        """The address that clients use."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind:  # such as a lost rank: nothing else tells waiting clients
            self._inbox.give_up()
        self._server.should_exit = True
        self._thread.join(2 * _CLOSE_S)
        self._structures.close()
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    async def _close_idle(self) -> None:
        """Close connections that since the last call neither completed their headers nor read waiting bytes."""
        connections: set[Any] = {*self._server.server_state.connections}
        idle = {
            (connection, connection.cycle, num_unread)
            for connection in connections
            if (num_unread := connection.transport.get_write_buffer_size())
            or not connection.cycle
            or connection.cycle.response_complete
        }
        for connection, *_ in idle & self._idle:
            connection.transport.abort()
        self._idle = idle

    async def _refuse(self, _request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            self._metrics.failed(GONE)
            return Response(status_code=GONE)
        if not isinstance(error, RequestError):
            reason, status = getattr(error, "detail", "the server failed"), getattr(error, "status_code", 500)
            headers, error = getattr(error, "headers", None), RequestError(reason, status=status)
        else:
            headers = {"retry-after": str(self._metrics.retry_s())} if error.status in {429, 503} else None
        self._metrics.failed(error.status)
        return Json(error.body(), error.status, headers)

    async def _health(self, _request: Request) -> Response:
        return Json({"status": "ok"})

    async def _count(self, _request: Request) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        models = {
            name: {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "llama-ssp",
                "max_model_len": self._reader.length,
            }
            for name in self._reader.names
        }
        asked = request.path_params.get("name")
        if asked is None:
            return Json({"object": "list", "data": [*models.values()]})
        if asked not in models:
            reason = f"this server has {' and '.join(models)}"
            raise RequestError(reason, param="model", status=404, code="model_not_found")
        return Json(models[asked])

    async def _tokenize(self, request: Request) -> Response:
        return Json(await asyncio.to_thread(self._reader.tokenize, await _body_of(request)))

    async def _detokenize(self, request: Request) -> Response:
        return Json({"prompt": await asyncio.to_thread(self._reader.detokenize, await _body_of(request))})

    async def _respond(self, request: Request) -> Response:
        arrived_s = time.monotonic()
        body = await _body_of(request)
        chat = as_chat(body)
        asked = await self._read(chat, is_chat=True)
        response = ResponseOf(asked, cast("dict[str, Any]", body))
        return await self._answer(request, asked, arrived_s, whole=response.whole, events=response.events)

    async def _complete(self, request: Request, *, is_chat: bool) -> Response:
        arrived_s = time.monotonic()
        body = await _body_of(request)
        asked = await self._read(body, is_chat=is_chat)
        return await self._answer(request, asked, arrived_s, whole=asked.whole, events=partial(_events, asked))

    async def _read(self, body: object, *, is_chat: bool) -> Asked:
        """Read a body while other answers go on: encoding and structures take time."""
        asked = await asyncio.to_thread(self._reader.read_fields, body, is_chat=is_chat)
        if asked.structure:
            limit_s, sampling = self._structure_s, asked.completions[0].sampling
            preparing = self._structures.submit(sampling, partial(self._reader.prepare, asked))
            try:
                await asyncio.wait_for(asyncio.wrap_future(preparing), limit_s)
            except TimeoutError:
                if preparing.cancelled():
                    reason = "structures of other texts are being prepared: ask again"
                    raise RequestError(reason, status=429, code="rate_limit_exceeded") from None
                reason = f"{asked.structure[0]} takes more than {limit_s:g} s to prepare (timeouts.structure_s)"
                raise RequestError(f"{reason}: make it smaller", param=asked.structure[0]) from None
        return asked

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        arrived_s: float,
        *,
        whole: Callable[[], dict[str, object]],
        events: Callable[[AsyncIterator[tuple[Answer, str]]], AsyncIterator[bytes]],
    ) -> Response:
        """Let the decoder answer; `whole` makes the body of an answer in one piece, `events` that of a stream."""
        parts: _Parts = asyncio.Queue()
        loop = asyncio.get_running_loop()
        begun, kept = set[int](), list[tuple[Answer, Part]]()

        def take(place: int, part: Part) -> None:
            """Pass a part on; keep parts that are only shown at the end: HTTP's thread takes the decoder's time."""
            kept.append((asked.answers[place], part))
            if asked.streams or part.finish_reason or place not in begun or len(kept) == _MOST_KEPT:
                begun.update([place] if part.new_ids else [])
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(parts.put_nowait, [*kept])
                kept.clear()

        client = client_of(request)
        numbers = self._inbox.put(asked.completions, take, client=client)
        pieces = self._pieces(parts, len(numbers), arrived_s, key=client.key)
        if asked.streams:
            body_of = self._streamed(events(self._counting(pieces)), numbers)
            return StreamingResponse(body_of, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        watching = asyncio.ensure_future(_until_gone(request, parts))
        try:
            async for _ in pieces:
                pass
        finally:
            watching.cancel()
            self._inbox.drop(numbers)
        if any(answer.is_scored for answer in asked.answers):
            return Response(await self._aside(_in_pieces, whole()), media_type=Json.media_type)
        return Json(whole())

    async def _aside(self, make: Callable[..., _T], *arguments: object) -> _T:
        """Write log-probabilities in the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, make, *arguments)

    async def _counting(self, pieces: AsyncIterator[tuple[Answer, str]]) -> AsyncIterator[tuple[Answer, str]]:
        """Pass pieces on, and count a stream that ends with an error, or whose client goes before its end."""
        try:
            async for piece in pieces:
                yield piece
        except RequestError as error:
            self._metrics.failed(error.status)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._metrics.failed(GONE)
            raise

    async def _pieces(
        self, parts: "_Parts", num_answers: int, arrived_s: float, *, key: str
    ) -> AsyncIterator[tuple[Answer, str]]:
        """Yield new text of answers until all have ended; raises RequestError if an answer fails or time is up."""
        left, first_s, limit_s = num_answers, dict[Answer, float](), self._task.request_s
        while left:
            try:
                async with asyncio.timeout(arrived_s + limit_s - time.monotonic()):
                    found = await parts.get()
            except TimeoutError:
                reason = f"the request took more than {limit_s:g} s (task.request_s)"
                raise RequestError(reason, status=504, code="timeout") from None
            if not found:
                raise ClientDisconnect
            for answer, part in found:
                if part.error:
                    raise part.error
                if part.waited_s is not None:
                    self._metrics.began(waited_s=part.waited_s)
                    continue
                now = time.monotonic()
                if part.new_ids and answer not in first_s:
                    first_s[answer] = now
                    self._metrics.first_token(now - arrived_s)
                text = answer.push(part)
                while part.finish_reason and answer.is_scored and await self._aside(answer.score_some):
                    pass  # a few tokens at a time, by turns with other answers
                if part.finish_reason:
                    left -= 1
                    self._metrics.ended(
                        answer, key=key, decoded_s=now - first_s.get(answer, now), whole_s=now - arrived_s
                    )
                yield answer, text

    async def _streamed(self, events: AsyncIterator[bytes], numbers: Sequence[int]) -> AsyncIterator[bytes]:
        """Yield events; a client that goes ends its completions."""
        try:
            async for event in events:
                yield event
        finally:
            self._inbox.drop(numbers)


async def _events(asked: Asked, pieces: AsyncIterator[tuple[Answer, str]]) -> AsyncIterator[bytes]:
    """Yield an answer as server-sent events."""
    try:
        async for answer, text in pieces:
            if text or answer.new_thoughts or answer.new_calls or answer.last or asked.shows_rounds:
                yield _event(asked.message(asked.choice(answer, text), counts=asked.counts_each))
        if asked.counts_usage:
            yield _event(asked.message(counts=True))
        yield b"data: [DONE]\n\n"
    except RequestError as error:
        yield _event(error.body())


def _file_of(name: str) -> Callable[[Request], Response]:
    """An answer with a file of the page."""
    return lambda _: FileResponse(Path(__file__).with_name("web") / name, headers=_OWN_ALONE)


_Parts = asyncio.Queue[list[tuple[Answer, Part]] | None]
"""Parts of the answers to a request, some at a time; None once its client has gone."""


async def _until_gone(request: Request, parts: _Parts) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    parts.put_nowait(None)


def _in_pieces(answer: Mapping[str, Any]) -> bytes:
    """Write an answer as JSON, choice by choice, so that other threads can run in between."""
    if "choices" not in answer:
        return json.dumps(answer).encode()
    choices = ", ".join(json.dumps(choice) for choice in answer["choices"])
    return json.dumps({**answer, "choices": []}).replace('"choices": []', f'"choices": [{choices}]', 1).encode()


async def _body_of(request: Request) -> object:
    """Read a body as JSON; raises RequestError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("a body must be JSON: send the header Content-Type: application/json", status=415)
    content = bytearray()
    try:
        async with asyncio.timeout(_READ_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise RequestError(f"a body may have {_MOST_BYTES >> 20} MiB", status=413)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {_READ_S:g} s", status=408) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else str(error)[:100]
        raise RequestError(f"the body is not JSON: {reason}") from None


def _event(content: dict[str, object]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def _listen(task: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in task.host else socket.AF_INET
    try:
        return socket.create_server((task.host, task.port), family=family)
    except OSError as error:
        remedy = "; task.port=0 takes a free one" if error.errno == EADDRINUSE else ""
        raise ConfigError(f"task.host={task.host} task.port={task.port}: {error.strerror}{remedy}") from error

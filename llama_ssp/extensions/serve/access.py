"""Decides who may use a server, by keys, hosts and origins of web pages, and ends connections as HTTP requires.

A web page of a stranger can send requests to the loopback from the browser of its visitor, and read the answers once
the page's own name resolves to the loopback (DNS rebinding). So a server refuses hosts that it does not know, origins
other than its own and `task.allow_origin`, and bodies that are not sent as JSON: browsers do not let a page send JSON
to another origin without asking that one first.
"""

import hmac
import json
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import h11
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from llama_ssp.catalogue import read_path
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.serve.inbox import ClientId, RequestError
from llama_ssp.extensions.serve.records import ServeConfig, is_loopback

_LOOK_S = 0.25


def read_keys(task: ServeConfig) -> Mapping[bytes, str]:
    """The keys of `task.api_key_file`, each with its name; none without a file. Raises ConfigError."""
    if task.api_key_file is None:
        return {}
    try:
        lines = Path(read_path(task.api_key_file)).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"task.api_key_file={task.api_key_file} cannot be read: {error.strerror}") from error
    keys = dict[bytes, str]()
    for number, line in enumerate(lines, start=1):
        key, *words = line.split()[:2] or [b""]
        name = words[0].decode(errors="replace") if words else f"key{number}"
        if key in keys or name in keys.values():
            raise ConfigError(f"task.api_key_file={task.api_key_file}: line {number} has a key or a name of another")
        if key:
            keys[key] = name
    if not keys:
        raise ConfigError(f"task.api_key_file={task.api_key_file} needs a key in its first line")
    return keys


def client_of(request: Request) -> ClientId:
    """The client of a request: the name of its key, and its address."""
    return ClientId(request.scope.get("key", ""), request.client.host if request.client else "")


class Json(JSONResponse):
    """A JSON response in ASCII, which can also hold lone surrogates that an error message quotes."""

    def render(self, content: object) -> bytes:
        """Write the content as JSON."""
        return json.dumps(content).encode()


class Access:
    """Lets requests pass that name a host of this server and come from no other origin.

    Closes the connection of a request whose length could be read in two ways.
    """

    def __init__(self, app: ASGIApp, *, task: ServeConfig) -> None:
        self._app, self._origin = app, task.allow_origin
        self._hosts = {task.host, *(host.lower() for host in task.hosts)}
        # Elsewhere a key keeps strangers out, and a server may have names that it does not know.
        self._knows_hosts = is_loopback(task.host) or bool(task.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see the class."""
        headers = dict(scope.get("headers", ()))
        is_framed_twice = b"transfer-encoding" in headers and (
            b"content-length" in headers or scope.get("http_version") == "1.0"
        )

        async def close_after(message: Message) -> None:
            """Source: RFC 9112, section 6.1."""
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        error = self._refuse(headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1"))
        app = Json(error.body(), error.status) if error else self._app
        await app(scope, receive, close_after if is_framed_twice else send)

    def _refuse(self, host: str, origin: str) -> RequestError | None:
        if self._knows_hosts and not self._is_own(host):
            return RequestError(f"this server is not {host[:200]!r}: task.hosts names further hosts", status=421)
        if not origin or origin == self._origin or urlsplit(origin).netloc.lower() == host.lower():
            return None
        reason = f"pages of {origin[:200]!r} may not ask this server: task.allow_origin names an origin that may"
        return RequestError(reason, status=403)

    def _is_own(self, host: str) -> bool:
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or is_loopback(name)
        return False


class WithKey:
    """Lets requests with a key pass, and requests for paths that are open; lets all pass if there are no keys.

    Writes the name of the key into the scope.
    """

    def __init__(self, app: ASGIApp, *, keys: Mapping[bytes, str], open_paths: Collection[str]) -> None:
        self._app, self._keys, self._open = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see the class."""
        scheme, _, given = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")
        # All keys are compared, so that the time tells nothing of them.
        names = [name for key, name in self._keys.items() if hmac.compare_digest(given, key)]
        if names and scheme.lower() == b"bearer":
            scope["key"] = names[0]
        if not self._keys or "key" in scope or scope.get("path") in self._open:
            await self._app(scope, receive, send)
        else:
            error = RequestError("the key is missing or wrong: send it as Authorization: Bearer KEY", status=401)
            await Json(error.body(), 401, {"www-authenticate": "Bearer"})(scope, receive, send)


class Connection(H11Protocol):
    """A connection whose client may shut its sending half and still get its answer."""

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's never keeps one open
        """Keep a connection open whose request is complete and unanswered, until the answer is written.

        A client that has gone sends the same as one that still reads. An interim answer, or a comment in a stream,
        makes the kernel of a client that has gone reset the connection.
        """
        cycle: RequestResponseCycle | None = self.cycle
        if not cycle or cycle.response_complete or self.conn.their_state not in {h11.DONE, h11.MUST_CLOSE, h11.CLOSED}:
            return False
        cycle.keep_alive = False
        with suppress(h11.LocalProtocolError):
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            probe = h11.Data(data=b":\n\n") if cycle.response_started else interim
            self.transport.write(self.conn.send(probe) or b"")
            self._end_if_reset()
        return True

    def _end_if_reset(self) -> None:
        """End a connection that was reset, which nothing else reports while nothing is read and written."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(_LOOK_S, self._end_if_reset)

"""Detects killed ranks: every rank has a connection to rank 0, and sends a farewell before it closes it.

Ranks of one replica notice in their next collective that a rank has ended. Replicas share no collective while they
decode, and the control channel cannot distinguish a killed rank from one that is stopped for a while. The operating
system can: it closes the connections of a process, however it ended. So rank 0 notices the end of every rank, and every
rank that of rank 0.

    rank 0     port and password           -> the rendezvous store
    rank N     password, at once           -> rank 0
    both       a farewell, when they leave -> the other end

If a rank cannot connect to rank 0, a killed rank is only noticed after the timeout, like a stopped one.
"""

import atexit
import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from llama_ssp.distributed.environment import listen

_log = logging.getLogger(__name__)
_KEY = "llama_ssp/heartbeat"
_FAREWELL = b"."
_CONNECT_S = 10.0
_MAX_BYTES = 64


class Heartbeat:
    """The connections of this rank; every rank makes one object per run.

    Args:
        store: a connection to the rendezvous store, used only here.
        host: of rank 0, as other ranks reach it.
        alarm: called once, from a thread, when a rank has ended without a farewell.
    """

    def __init__(self, store: Store, *, host: str, rank: int, alarm: Callable[[], None]) -> None:
        self._store = store
        self._host = host
        self._alarm = alarm
        self._is_over = Event()
        self._open: list[socket.socket] = []
        atexit.register(self.part)
        if rank == 0:
            password = secrets.token_hex(16)
            server = listen(host)
            self._open.append(server)
            Thread(target=self._accept, args=(server, password.encode()), daemon=True, name="heartbeat").start()
            store.set(_KEY, f"{server.getsockname()[1]} {password}")
        else:
            Thread(target=self._connect, daemon=True, name="heartbeat").start()

    def part(self) -> None:
        """Send a farewell and stop watching: this rank ends without a fault."""
        self._is_over.set()
        for connection in self._open:
            with suppress(OSError):  # the listening socket, and ranks that have left already
                connection.sendall(_FAREWELL)

    def _accept(self, server: socket.socket, password: bytes) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError as error:  # too many open files: later ranks have no heartbeat
                _log.info("no more heartbeats are accepted: %s", error)
                return
            self._open.append(connection)
            Thread(target=self._listen, args=(connection, password), daemon=True, name="heartbeat").start()

    def _connect(self) -> None:
        try:
            port, password = self._store.get(_KEY).decode().split()
            connection = socket.create_connection((self._host, int(port)), timeout=_CONNECT_S)
            connection.settimeout(None)
            self._open.append(connection)
            connection.sendall(password.encode())
        except (OSError, DistError) as error:
            _log.info("no heartbeat to rank 0 at %s: %s", self._host, error)
            return
        self._listen(connection, b"")

    def _listen(self, connection: socket.socket, password: bytes) -> None:
        """Read until the other end closes; connections without the password are ignored."""
        received = b""
        with connection, suppress(OSError):  # closed with unread data
            while len(received) < _MAX_BYTES and (data := connection.recv(_MAX_BYTES)):
                received += data
        if received == password and not self._is_over.is_set():
            self._is_over.set()
            self._alarm()

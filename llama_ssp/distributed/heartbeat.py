"""A connection from every rank to rank 0 over which nothing is said but farewell: who is killed leaves without one.

Ranks inside a copy of the models see in their next collective that one of them has ended. Copies have none in common
while they decode, and no call (`watch`) tells a rank that was killed from one that is stopped for a while. The system
does: it closes what a process had open, whatever ended it. Rank 0 learns of every rank that way, and all of rank 0.

    rank 0     port and password           -> the store in which all ranks have met
    rank N     password, at once           -> rank 0
    both       a farewell, when they leave -> the other end

Where a rank cannot reach rank 0, ranks are only missed after the timeout, as those that are stopped.
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

_log = logging.getLogger(__name__)
_KEY = "llama_ssp/lifeline"
_FAREWELL = b"."
_CONNECT_S = 10.0
_MAX_WORDS = 64


class Heartbeat:
    """This rank's end; all ranks make one, once in a run.

    Args:
        store: in which all ranks have met; it is this object's own.
        host: of rank 0, as other ranks reach it.
        rank: in the world.
        size: of the world.
        alarm: called from a thread, once, when a rank has ended without a farewell.
    """

    def __init__(self, store: Store, *, host: str, rank: int, size: int, alarm: Callable[[], None]) -> None:
        self._store = store
        self._host = host
        self._alarm = alarm
        self._is_over = Event()
        self._open: list[socket.socket] = []
        atexit.register(self.part)
        if rank == 0:
            password = secrets.token_hex(16)
            door = _door(size)
            self._open.append(door)
            Thread(target=self._let_in, args=(door, password.encode()), daemon=True, name="lifeline").start()
            store.set(_KEY, f"{door.getsockname()[1]} {password}")
        else:
            Thread(target=self._hold, daemon=True, name="lifeline").start()

    def part(self) -> None:
        """Leave in peace: this rank's end is no fault, and it looks after nobody any more."""
        self._is_over.set()
        for connection in self._open:
            with suppress(OSError):  # the door, and whoever has left already
                connection.sendall(_FAREWELL)

    def _let_in(self, door: socket.socket, password: bytes) -> None:
        while True:
            try:
                connection, _ = door.accept()
            except OSError as error:  # this process may open no more: who comes later goes without
                _log.info("no more lifelines: %s", error)
                return
            self._open.append(connection)
            Thread(target=self._listen, args=(connection, password), daemon=True, name="lifeline").start()

    def _hold(self) -> None:
        try:
            port, password = self._store.get(_KEY).decode().split()
            connection = socket.create_connection((self._host, int(port)), timeout=_CONNECT_S)
            connection.settimeout(None)
            self._open.append(connection)
            connection.sendall(password.encode())
        except (OSError, DistError) as error:
            _log.info("no lifeline to rank 0 at %s: %s", self._host, error)
            return
        self._listen(connection, b"")

    def _listen(self, connection: socket.socket, password: bytes) -> None:
        """Hear the other end out; a stranger, who does not know the password, may come and go."""
        said = b""
        with connection, suppress(OSError):  # closed without all that was sent having been read
            while len(said) < _MAX_WORDS and (words := connection.recv(_MAX_WORDS)):
                said += words
        if said == password and not self._is_over.is_set():
            self._is_over.set()
            self._alarm()


def _door(size: int) -> socket.socket:
    """A socket to which any host can connect, by either protocol where this one knows both."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=size)

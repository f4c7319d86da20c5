"""Which addresses the processes of a run listen on, as the kernel lists them."""

from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENS = "0A"
_WORD = 8
"""Hexadecimal digits of 32 bits, which the kernel writes in the byte order of the machine."""


def family_of(pid: int) -> list[int]:
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def listeners(pid: int) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """The addresses and ports that a process or one that descends from it listens on now."""
    own = {inode for each in family_of(pid) for inode in _sockets(each)}
    return {(address, port) for inode, address, port in _listening() if inode in own}


def is_loopback(address: IPv4Address | IPv6Address) -> bool:
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _sockets(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(file.readlink())
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _listening() -> Iterator[tuple[str, IPv4Address | IPv6Address, int]]:
    """The inode, the address and the port of every listening socket; IPv6 has four words, `::` also takes IPv4."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            digits, _, port = fields[1].partition(":")
            if fields[3] == _LISTENS:
                words = [bytes.fromhex(digits[i : i + _WORD])[::-1] for i in range(0, len(digits), _WORD)]
                yield fields[9], ip_address(b"".join(words)), int(port, 16)

"""Keeps compiled code in the user's cache folder, so that only the first run on a machine compiles.

A file is used only if it and its folder belong to this user, nobody else may write to either, and its first bytes are
the hash of the rest.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_HASH_BYTES = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = 0o022


def keep(name: str, key: str, make: Callable[[], bytes]) -> bytes:
    """The code that was kept under a name and a key; if there is none, make it, and keep it if that is possible.

    `key` holds whatever decides the code.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llama_ssp" / "kernels"
    file = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    with suppress(OSError):
        if _is_own(folder) and _is_own(file):
            kept = file.read_bytes()
            code = kept[_HASH_BYTES:]
            if kept[:_HASH_BYTES] == hashlib.sha256(code).digest():
                return code
    code = make()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as unfinished:
            unfinished.write(hashlib.sha256(code).digest() + code)
        Path(unfinished.name).replace(file)
    return code


def _is_own(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & _OTHERS_MAY_WRITE

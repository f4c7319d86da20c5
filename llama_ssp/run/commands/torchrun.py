"""The end of failed ranks under torchrun, which prints a traceback of its own and a report of every failed rank.

The report quotes a rank's error file. So rank 0 writes its sentence there, and the other ranks of its node, which have
failed alike, end with 0 once they have seen it: the job still fails by rank 0, and the report names that rank alone.

    torchelastic_*/*/attempt_0/0/error.json   of local rank 0
    torchelastic_*/*/attempt_0/1/seen.json    of local rank 1, ...
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llama_ssp.ranks.process import Ranks

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SILENCE_S = 5.0
"""How long ranks above 0 wait after an error: torchrun ends all when one has ended, and rank 0 must report first."""
_SEEN = "seen.json"
_READERS_S = 3.0
_LEAD_S = 0.4
_LOOK_EVERY_S = 0.02


def report(sentence: str, ranks: Ranks) -> None:
    """Write the sentence of rank 0 where torchrun quotes it, and let the other ranks of its node end first.

    A rank that starts late has `_READERS_S` to see the sentence.
    """
    file = _error_file()
    if file is None:
        return
    said = {"message": sentence, "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))}}
    readers = [file.parent.parent / str(local_rank) / _SEEN for local_rank in range(1, ranks.local_size)]
    with suppress(OSError, KeyboardInterrupt):
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"message": said}), encoding="utf-8")
        part.rename(file)
        if _appear(readers, within_s=_READERS_S):
            time.sleep(_LEAD_S)


def await_report(ranks: Ranks) -> bool:
    """Wait until rank 0 has reported on this node, or for `SILENCE_S`; returns whether it has."""
    file = _error_file()
    # Ranks of other nodes, and those that torchrun did not start, have nobody to wait for.
    reported = file.parent.parent / "0" / file.name if file and ranks.rank == ranks.local_rank else None
    with suppress(KeyboardInterrupt):
        if file is None or reported is None:
            time.sleep(SILENCE_S)
        elif _appear([reported], within_s=SILENCE_S):
            with suppress(OSError):
                (file.parent / _SEEN).touch()
            return True
    return False


def _appear(files: Sequence[Path], *, within_s: float) -> bool:
    """Wait for files; returns whether all of them have come."""
    end_s = time.monotonic() + within_s
    while not (come := all(file.exists() for file in files)) and time.monotonic() < end_s:
        time.sleep(_LOOK_EVERY_S)
    return come


def _error_file() -> Path | None:
    named = os.environ.get(ERROR_FILE)
    return Path(named) if named else None

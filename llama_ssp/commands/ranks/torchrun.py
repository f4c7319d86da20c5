"""The end of failed ranks under torchrun, which prints a traceback of its own and a report of every failed rank.

The report quotes a rank's error file. So rank 0 writes its sentence there, and the other ranks of its node, which have
failed alike, end with 0 once it has: the job still fails by rank 0, and the report names that rank alone.

    torchelastic_*/*/attempt_0/0/error.json   of local rank 0
    torchelastic_*/*/attempt_0/1/error.json   of local rank 1, ...
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from llama_ssp.distributed.environment import Ranks

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SILENCE_S = 5.0
"""How long ranks above 0 wait after an error: torchrun ends all when one has ended, and rank 0 must report first."""
_LEAD_S = 0.4
_LOOK_EVERY_S = 0.02


def report(sentence: str) -> None:
    """Write the sentence of rank 0 where torchrun quotes it, and let the other ranks end first."""
    file = _error_file()
    if file is None:
        return
    said = {"message": sentence, "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))}}
    with suppress(OSError, KeyboardInterrupt):
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"message": said}), encoding="utf-8")
        part.rename(file)
        time.sleep(_LEAD_S)


def await_report(ranks: Ranks) -> bool:
    """Wait until rank 0 has reported on this node, or for `SILENCE_S`; returns whether it has."""
    file = _error_file()
    reported = file.parent.parent / "0" / file.name if file and ranks.rank == ranks.local_rank else None
    end_s = time.monotonic() + SILENCE_S
    with suppress(KeyboardInterrupt):
        while time.monotonic() < end_s and not (reported and reported.exists()):
            time.sleep(min(_LOOK_EVERY_S, SILENCE_S))
    return bool(reported and reported.exists())


def _error_file() -> Path | None:
    named = os.environ.get(ERROR_FILE)
    return Path(named) if named else None

"""Whatever ends a run becomes one error, the same on every rank that is still there, which one of them tells.

What a collective raises says little: a connection was closed, or nothing came in time, often from a rank that itself
only gave up waiting. So the ranks call each other (`watch`), and those that do not answer are named.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from llama_ssp.distributed.agree import from_message, to_message
from llama_ssp.distributed.control_channel import ControlChannel
from llama_ssp.distributed.exhaustion import exhaustion
from llama_ssp.distributed.signals import STOP_SIGNALS
from llama_ssp.errors import InterruptedRun, LostRankError, SspError

_TIMEOUT_WORDS = ("timed out", "timeout")
_REMEDY = "the same command with the same run_dir goes on from here"


@dataclass(kw_only=True)
class Phase:
    """What a run is doing, for messages.

    Attributes:
        doing: as a verb, for example "loading".
        limit: the setting that says how long a rank waits for another one, with its value.
    """

    doing: str
    limit: str


@contextmanager
def unify_failure(watch: ControlChannel, phase: Phase) -> Iterator[None]:
    """Turn what ends a block into the error that ends the run on every rank; a rank alone keeps its own.

    Args:
        watch: of this rank.
        phase: where the run is when the block ends; its owner changes it.

    Raises:
        SspError: what a rank has met first, or the ranks that do not answer. `speaks` says whether this rank tells it.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if watch.size == 1:
            found = exhaustion(error)
            if found is None:
                raise
            raise found from error
        # Launchers send one as soon as any rank has ended, and the status and the sentence come first.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        ending = _ending(error, watch, phase)
        if ending is None:
            raise
        raise ending from error


def _ending(error: BaseException, watch: ControlChannel, phase: Phase) -> SspError | None:
    """What the run ends with; None where this rank alone met what nobody has foreseen, and shows its traceback."""
    words, missing, is_unforeseen = watch.verdict, tuple[int, ...](), False
    if words is None:
        mine = error if isinstance(error, SspError) else _exhaustion(error, watch.rank, phase)
        if mine is None:
            missing = watch.missing() if isinstance(error, KeyboardInterrupt | RuntimeError) else ()
            mine = _message(error, missing, phase, is_orphan=watch.is_orphan)
        if mine is None:
            is_unforeseen = True
            said = str(error).strip().partition("\n")[0]
            mine = LostRankError(f"rank {watch.rank} failed while {phase.doing}: {type(error).__name__}: {said}")
        words = watch.settle(to_message(mine), without=missing)
        is_unforeseen &= words == to_message(mine)
    ending = from_message(words)
    ending.speaks = watch.is_error_reporter(without=missing)
    return None if is_unforeseen else ending


def _exhaustion(error: BaseException, rank: int, phase: Phase) -> SspError | None:
    """What `exhaustion` says, and on which rank: the others have met nothing of it."""
    found = exhaustion(error)
    return found and type(found)(f"rank {rank} failed while {phase.doing}: {found}")


def _message(error: BaseException, missing: tuple[int, ...], phase: Phase, *, is_orphan: bool) -> SspError | None:
    """Put what a collective or a signal says into a sentence; None for an error that is neither."""
    said = str(error).lower()
    is_late = any(words in said for words in _TIMEOUT_WORDS)
    if missing:
        cause = f"no answer within {phase.limit}" if is_late else "connection closed"
        if isinstance(error, KeyboardInterrupt):
            cause = "no answer"
        names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
        return LostRankError(f"{names} missing while {phase.doing} ({cause}); {_REMEDY}")
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRun("interrupted")
    if isinstance(error, dist.DistError) or "gloo" in said:
        if is_orphan:  # the others are too, and have noticed it first
            return InterruptedRun("interrupted")
        cause = f"no answer within {phase.limit}" if is_late else "connection closed"
        return LostRankError(f"ranks lost each other while {phase.doing} ({cause}), though all are alive; {_REMEDY}")
    return None

"""Turns any failure into one error, the same on every rank that is still alive, which one of them reports.

The error of a collective says little: a connection was closed, or a timeout passed, often because of a rank that only
stopped waiting itself. So the ranks call each other over the control channel, and the error names those that do not
answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from llama_ssp.distributed.agree import from_message, to_message
from llama_ssp.distributed.control_channel import ControlChannel
from llama_ssp.distributed.memory import exhaustion
from llama_ssp.distributed.signals import ignore_signals
from llama_ssp.errors import InterruptedRun, LostRankError, SspError

_E = TypeVar("_E", bound=BaseException)
_TIMEOUT_WORDS = ("timed out", "timeout")
_REMEDY = "run the same command with the same run_dir to resume"


@dataclass(kw_only=True)
class Phase:
    """What a run is doing, for messages: a verb such as "loading", and the setting of its timeout with the value."""

    doing: str
    limit: str


@contextmanager
def unify_failure(watch: ControlChannel, phase: Phase) -> Iterator[None]:
    """Turn an error of the block into the error that ends the run on every rank; a single rank keeps its own.

    That is the first error of any rank, or the ranks that do not answer; its `speaks` is set if this rank reports it.
    The caller keeps `phase` up to date.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if watch.size == 1:
            found = exhaustion(error)
            if found is None:
                raise
            raise found from error
        # Launchers send one as soon as any rank has ended, before this rank has written the status and the message.
        ignore_signals()
        ending = ending_of(error, watch, phase)
        if ending is error:
            raise
        raise ending from error


def ending_of(error: _E, watch: ControlChannel, phase: Phase) -> SspError | _E:
    """The error that ends the run, settled with the other ranks; `error` itself if nobody has foreseen it."""
    words, missing, is_unforeseen = watch.verdict, tuple[int, ...](), False
    if words is None:
        mine = error if isinstance(error, SspError) else exhaustion(error)
        if mine and mine is not error:  # its text has no rank, which the other ranks do not know
            mine = type(mine)(f"rank {watch.rank} failed while {phase.doing}: {mine}")
        if mine is None:
            missing = watch.missing() if isinstance(error, KeyboardInterrupt | RuntimeError) else ()
            mine = _message(error, missing, phase, is_orphan=watch.is_orphan, has_failed=watch.has_failed)
        if mine is None:
            is_unforeseen = True
            reason = str(error).strip().partition("\n")[0]
            mine = LostRankError(f"rank {watch.rank} failed while {phase.doing}: {type(error).__name__}: {reason}")
        words = watch.settle(to_message(mine), without=missing)
        is_unforeseen &= words == to_message(mine)
    ending = from_message(words)
    ending.speaks = watch.is_error_reporter(without=missing)
    return error if is_unforeseen else ending


def _message(
    error: BaseException, missing: tuple[int, ...], phase: Phase, *, is_orphan: bool, has_failed: bool
) -> SspError | None:
    """Describe the error of a collective or a signal; None for other errors."""
    reason = str(error).lower()
    is_late = any(words in reason for words in _TIMEOUT_WORDS)
    if missing:
        cause = f"no answer within {phase.limit}" if is_late else "connection closed"
        if isinstance(error, KeyboardInterrupt) and not has_failed:
            cause = "no answer"
        names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
        return LostRankError(f"{names} missing while {phase.doing} ({cause}); {_REMEDY}")
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRun("interrupted")
    if isinstance(error, dist.DistError) or "gloo" in reason:
        if is_orphan:  # all ranks are, and others noticed it first
            return InterruptedRun("interrupted")
        cause = f"no answer within {phase.limit}" if is_late else "connection closed"
        return LostRankError(f"ranks lost each other while {phase.doing} ({cause}), though all are alive; {_REMEDY}")
    return None

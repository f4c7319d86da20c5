"""The exceptions that a user can meet, and how their messages are built.

A message says what was given, what is required, and what would work. This module knows nothing of the rest of the
package; `launch` turns each class into its exit code.
"""

import errno
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says of a full disk, a full share of it, and a file as long as this process may make one."""


class SspError(Exception):
    """A problem that the user can mend; its text is one sentence for the terminal.

    Attributes:
        speaks: whether this rank tells the user; None where all ranks meet the error alike, and rank 0 speaks.
    """

    exit_code = 2
    speaks: bool | None = None


class ConfigError(SspError):
    """A setting that is unknown, out of range, without effect, or at odds with another one."""


class CheckpointError(SspError):
    """A checkpoint with missing, truncated, corrupt or unsupported files."""


class PlacementError(SspError):
    """A model that cannot be laid out over the ranks as asked."""


class CapacityError(SspError):
    """A plan that does not fit into memory."""

    exit_code = 3


class LostRankError(SspError):
    """Ranks that no longer answer, or one that failed in a way that nobody had foreseen; the run can be resumed."""

    exit_code = 1


LOGITS_ARE_NAN = (
    "logits became NaN: the weights of the target or the draft hold NaN, or numbers grew too large for their format "
    "(fp16 ends at 65504; bf16 and fp32 go on)"
)


class NumericError(SspError):
    """Logits that are no numbers: what would follow is no text of the target."""

    exit_code = 1


class InterruptedRun(SspError):  # noqa: N818 - no error, but an end
    """A run that was asked to stop and can be resumed."""

    exit_code = 4


def one_message(problems: Sequence[str]) -> str:
    """Join all problems of a config into one message.

    Args:
        problems: at least one complete clause each, without a final full stop.

    Returns:
        The only problem as it is, or a numbered list behind their count.
    """
    if len(problems) == 1:
        return problems[0]
    lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, start=1)]
    return f"{len(problems)} problems in the configuration:\n" + "\n".join(lines)


def unknown_name(kind: str, given: str, known: Iterable[str]) -> str:
    """Say that a name does not exist, what does, and what was probably meant.

    Args:
        kind: what the name should have named, for example "model".
        given: the name as the user wrote it.
        known: every name that exists.

    Returns:
        One sentence without a full stop.
    """
    names = sorted(known)
    close = get_close_matches(given, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown {kind} {given!r}: there are {', '.join(names)}{hint}"

"""The exceptions that a user can meet, and their messages: what was given, what is required, what would work.

`run.commands` turns each class into its exit code.
"""

import errno
import json
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from llama_ssp.manifest import absent
from llama_ssp.text.messages import to_library

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a full disk, an exhausted quota, and a file at the size limit of this process."""


class SspError(Exception):
    """A problem that the user can fix; its text is one sentence for the terminal.

    Attributes:
        speaks: whether this rank reports it; None if all ranks raise the same error, which rank 0 then reports.
    """

    exit_code = 2

    def __init__(self, sentence: str, *, speaks: bool | None = None) -> None:
        super().__init__(sentence)
        self.speaks = speaks

    def hush(self) -> None:
        """Leave the report to other ranks."""
        self.speaks = False


class ConfigError(SspError):
    """A setting that is unknown, out of range, without effect, or in conflict with another one."""


class CheckpointError(SspError):
    """A checkpoint with missing, truncated, corrupt or unsupported files."""


class PlacementError(SspError):
    """A model that cannot be placed on the ranks as requested."""


class CapacityError(SspError):
    """A plan that does not fit into memory."""

    exit_code = 3


class LostRankError(SspError):
    """Ranks that no longer answer, or one that failed unexpectedly; the run can be resumed.

    Attributes:
        remedy: what the user should do then, unless the task says otherwise (`TaskSpec.if_lost`).
    """

    exit_code = 1
    remedy = "run the same command with the same run_dir to resume"


LOGITS_ARE_NAN = (
    "logits became NaN: the weights of the target or the draft hold NaN, or numbers grew too large for their format "
    "(fp16 ends at 65504; bf16 and fp32 have a larger range)"
)
NOTHING_ALLOWED = "no token is left that the constraint of the text allows, after bans and biases"


class NumericError(SspError):
    """NaN in the logits: text that is drawn after it would not be the target's."""

    exit_code = 1


class FailedEvaluation(SspError):  # noqa: N818 - no error, but a verdict
    """A negative verdict of a task for which this is an error; all records are complete."""

    exit_code = 1


class InterruptedRun(SspError):  # noqa: N818 - no error, but an end
    """A run that was stopped on request, and can be resumed."""

    exit_code = 4

    def __init__(self, sentence: str, *, speaks: bool | None = None, run_dir: str | None = None) -> None:
        super().__init__(sentence, speaks=speaks)
        self.run_dir = run_dir

    @classmethod
    def in_folder(cls, run_dir: str | None) -> "InterruptedRun":
        """An interruption whose sentence says how to go on, with the run folder quoted for a shell."""
        how = f"{shlex.quote(f'run_dir={run_dir}')} with the same settings goes on from here"
        return cls(f"interrupted; {how}", run_dir=run_dir)


def one_message(problems: Sequence[str]) -> str:
    """Join all problems of a config, clauses without a full stop, into one message; several become a numbered list."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, start=1)]
    return f"{len(problems)} problems in the {'arguments' if to_library() else 'configuration'}:\n" + "\n".join(lines)


def refuse(problems: Sequence[str]) -> None:
    """Raise one ConfigError for all problems; do nothing without any."""
    if problems:
        raise ConfigError(one_message(problems))


def similar_name(given: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant, whatever the case of the letters; None if none is similar.

    Names that contain the given text come first, of these the ones that begin with it, then the shortest.
    """
    names = {name.casefold(): name for name in known}
    wanted = given.casefold()
    longer = [name for name in names if _contains(name, wanted)]
    if longer:
        return names[min(longer, key=lambda name: (not name.startswith(wanted), len(name), name))]
    close = get_close_matches(wanted, names, n=1) or [name for name in names if sorted(name) == sorted(wanted)]
    return names[close[0]] if close else None


def _contains(name: str, wanted: str) -> bool:
    """Whether a text is inside of a name; one of two letters only at its beginning."""
    return wanted in name if len(wanted) > 2 else len(wanted) > 1 and name.startswith(wanted)


def unknown_name(kind: str, given: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name of a `kind` such as "model", without a full stop.

    The message lists the known names and suggests a similar one. If the name belongs to an extension that is not
    installed, the message says only that.
    """
    if sentence := absent(kind, given):
        return sentence
    names = sorted(known)
    close = similar_name(given, names)
    hint = f"; did you mean {close}?" if close else ""
    return f"unknown {kind} {given!r}: there are {', '.join(names)}{hint}"


_MOST_SHOWN = 60


def shown(value: object) -> str:
    """A value of a file for an error message: as ASCII JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."

"""Settings and commands that a plan prints; each passes the checks of the command that prints it first.

Commands say what they accept (`accepting`). Code that prints a setting asks `accepted` or `command` first. Where it is
refused, the code leaves the sentence out, or looks for another choice.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Accepts = Callable[[Sequence[str], bool], bool]
"""Whether settings can be planned: a whole command line, or settings that are added to the asked ones (False)."""
_ACCEPTS: ContextVar[Accepts] = ContextVar("accepts", default=lambda _settings, _is_whole: True)


@contextmanager
def accepting(accepts: Accepts) -> Iterator[None]:
    """Let the plans of the block name only settings that pass."""
    token = _ACCEPTS.set(accepts)
    try:
        yield
    finally:
        _ACCEPTS.reset(token)


def accepted(*settings: str) -> bool:
    """Whether the asked command takes these settings as well."""
    return _ACCEPTS.get()(settings, False)


def command(verb: str, *settings: str) -> str | None:
    """Return a shell command of this program; None for one that the program would refuse.

    The settings of a plan suffice for a plan. A run's command also needs the settings that the user gave, because only
    a plan names its machine.
    """
    is_plan = verb == "plan"
    planned = settings if is_plan else [one for one in settings if not one.startswith("task")]
    return shlex.join(["llama-ssp", verb, *settings]) if _ACCEPTS.get()(planned, is_plan) else None

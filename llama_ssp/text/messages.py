"""Text for people: settings by the names that the user knows, numbers, and control characters made visible.

Sentences name a setting by `key_of` and `said`: to the user of a command as it stands on the command line, to the user
of the library as an argument.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path

_READER: ContextVar[str] = ContextVar("reader", default="command")
"""Who reads the sentences: of the command line, of the library, or who sent a request."""
_ARGUMENTS = {"verification.rule": "verification"}
_GROUPS = {"sampling", "speculation", "verification", "hardware", "draft", "model", "draft.model"}
"""Settings with another name as arguments, and groups whose settings are arguments without the group."""
_PHRASES: dict[tuple[str, str], str] = {
    ("sampling", "greedy"): "temperature=0",
    ("sampling", "model"): "sampling='model'",
    ("model.path", "DIR"): "the folder of a checkpoint",
    ("draft.model.path", "DIR"): "the folder of a checkpoint",
}


@contextmanager
def _read_by(reader: str) -> Iterator[None]:
    token = _READER.set(reader)
    try:
        yield
    finally:
        _READER.reset(token)


in_library_words = partial(_read_by, "library")
"""Lets the sentences of a block name arguments, with values in Python."""
in_request_words = partial(_read_by, "request")
"""Lets the sentences of a block name the fields of a request, with values in JSON."""


def to_library() -> bool:
    """Whether sentences name arguments, of the library or of a request, and not settings of the command line."""
    return _READER.get() != "command"


def key_of(name: str) -> str:
    """The name of a setting, given by its dotted key."""
    group, _, last = name.rpartition(".")
    return _ARGUMENTS.get(name, last if group in _GROUPS else name) if to_library() else name


def said(name: str, value: object) -> str:
    """A setting with its value."""
    if to_library() and (name, str(value)) in _PHRASES:
        return _PHRASES[name, str(value)]
    return f"{key_of(name)}={value_of(value)}"


def value_of(value: object) -> str:
    """A value, as the user writes it."""
    is_word = _READER.get() != "library" and (value is None or isinstance(value, bool))
    return {"None": "null", "True": "true", "False": "false"}[str(value)] if is_word else str(value)


def installing(extra: str) -> str:
    """The command that installs an extra of this package: into the environment of a checkout, or from an index."""
    if (Path(__file__).parents[2] / "machine-install.sh").is_file():
        return f".venv/bin/python -m pip install -e '.[{extra}]' -c .venv/constraints.txt"
    return f"pip install 'llama-ssp[{extra}]'"


def lasting(seconds: float) -> str:
    """A duration, as in "12 s", "4 min" and "1 h 30 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in "one node" and "8 GPUs"."""
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def count(number: int, noun: str) -> str:
    """A number with its noun in figures and tables, as in "1 prompt" and "8 prompts"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], last: str = "and") -> str:
    """Names in a sentence, as in "a, b and c"."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def decimal(value: float | None, places: int = 2, *, unit: str = "", missing: str = "-") -> str:
    """A measured figure of a table with `places` decimals; `missing` for one that was not measured."""
    return missing if value is None else f"{value:.{places}f}{unit}"


def share(value: float | None) -> str:
    """A share of a table in percent."""
    return "-" if value is None else f"{100 * value:.0f} %"


def rounded(value: float, digits: int = 3) -> str:
    """A number to `digits` digits, as in "0.554", "9.40" and "70.0"; a larger one keeps all before the point."""
    has_decimals = abs(value) < 10 ** (digits - 1) - 0.05
    return f"{value:#.{digits}g}" if has_decimals else f"{value:.0f}"


# C0 except tab and line feed, DEL, C1, the marks that change the writing direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Write out the control characters of a text, except tabs and line feeds, as Python would: `\x1b`."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)

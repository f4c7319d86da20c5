"""Text for people: numbers in words and digits, and control characters made visible."""

import re


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in "one node" and "8 GPUs"."""
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def count(number: int, noun: str) -> str:
    """A number with its noun in figures and tables, as in "1 prompt" and "8 prompts"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def decimal(value: float | None, places: int = 2, *, unit: str = "", missing: str = "-") -> str:
    """A measured figure of a table with so many decimals; `missing` for one that was not measured."""
    return missing if value is None else f"{value:.{places}f}{unit}"


def share(value: float | None) -> str:
    """A share of a table in percent."""
    return "-" if value is None else f"{100 * value:.0f} %"


def rounded(value: float, digits: int = 3) -> str:
    """A number to so many digits, as in "0.554", "9.40" and "70.0"; a larger one keeps all before the point."""
    has_decimals = abs(value) < 10 ** (digits - 1) - 0.05
    return f"{value:#.{digits}g}" if has_decimals else f"{value:.0f}"


# C0 except tab and line feed, DEL, C1, the marks that change the writing direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Write out the control characters of a text, except tabs and line feeds, as Python would: `\x1b`."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)

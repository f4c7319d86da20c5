"""Prompts that are typed at a terminal: several lines, line editing, and a history that later runs have too."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from llama_ssp.catalogue import base_dir

_GOES_ON = "\\"
_MOST_ENTRIES = 1000


def typed_prompts() -> Iterator[str]:
    """Read prompts until the input ends, without empty ones; a line that ends with a backslash goes on in the next.

    Text that is pasted is one prompt with all its lines. If standard output is no terminal, it asks on standard error.
    Raises what `input` raises, but EOFError.
    """
    readline = _line_editing()
    lines: list[str] = []
    while True:
        sign = ". " if lines else "> "
        try:
            if not sys.stdout.isatty():
                with suppress(OSError):
                    sys.stderr.write(sign)
                    sys.stderr.flush()
                sign = ""
            line = input(sign)
        except EOFError:
            if lines:
                yield "\n".join(lines)
            return
        finally:
            if readline:
                with suppress(OSError):  # without a folder that can be written, this run alone has it
                    history_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    readline.set_history_length(_MOST_ENTRIES)
                    readline.write_history_file(history_file())
        lines.append(line.removesuffix(_GOES_ON))
        if line.endswith(_GOES_ON):
            continue
        text = "\n".join(lines)
        lines = []
        if text.strip():
            yield text


def history_file() -> Path:
    """Return the file of the history: `llama-ssp/history` in $XDG_STATE_HOME, else in `~/.local/state`."""
    return base_dir("STATE", "~/.local/state") / "llama-ssp" / "history"


def _line_editing() -> ModuleType | None:
    """Add line editing and the history to `input`, where Python has them."""
    try:
        readline = import_module("readline")
    except ImportError:
        return None
    readline.parse_and_bind("set enable-bracketed-paste on")
    if not readline.get_current_history_length():
        with suppress(OSError):
            readline.read_history_file(history_file())
    return readline

"""Parses paths as users write them. The caller checks what is there."""

import os
from pathlib import Path

from llama_ssp.errors import ConfigError


def read_path(text: str) -> Path:
    """Return the path with `~` expanded, which need not exist; raise ConfigError if it cannot be looked up."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"{text} cannot be read ({reason}): name another path") from None
    return path


ENDINGS_WITH_FIELDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Endings of files of prompts whose entries have fields."""


def ending_of(path: str) -> str:
    """Return the ending of a file's name, in lower case and with its dot; empty without one."""
    return os.path.splitext(path)[1].lower()  # noqa: PTH122 - Path raises an error for names that no file can have

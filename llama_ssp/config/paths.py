"""Parses paths as users write them. The caller checks what is there."""

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

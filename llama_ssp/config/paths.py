"""Paths as users write them. What lies there is the business of who reads it."""

from pathlib import Path

from llama_ssp.errors import ConfigError


def read_path(text: str) -> Path:
    """Return the path that a text means, with `~` for a home; nothing need exist there.

    Raises:
        ConfigError: nothing can have such a name, or this user may not look there.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"{text} cannot be read ({reason}): name another path") from None
    return path

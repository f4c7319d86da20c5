"""Hydra's completion of names with Tab, behind checks of ours: `eval "$(python launch/run.py -sc install=bash)"`.

The shell's script calls `-sc query=bash` at every Tab. A line that Hydra cannot read has no candidates, since whatever
else is printed would land in the middle of what the user is typing.
"""

import contextlib
import io
import os
from collections.abc import Iterator, Sequence

from llama_ssp.errors import ConfigError
from llama_ssp.visible import visible

COMMANDS, SHELLS = ("install", "uninstall", "query"), ("bash", "zsh", "fish")
LINE = "COMP_LINE"
"""Variable in which the shell gives the line that is being typed."""
_REMEDY = 'eval "$(python launch/run.py -sc install=bash)" completes names with Tab'


def is_query(words: Sequence[str]) -> bool:
    """Whether the shell asks for candidates, rather than the user for a script."""
    return words[0].startswith("query=")


def check(words: Sequence[str]) -> None:
    """Refuse what Hydra's completion would answer with a traceback.

    Args:
        words: the command line without its options.

    Raises:
        ConfigError: says what would work.
    """
    if len(words) != 1 or words[0] not in {f"{command}={shell}" for command in COMMANDS for shell in SHELLS}:
        given = " ".join(words) or "nothing"
        raise ConfigError(
            f"--shell-completion (-sc) needs one of {', '.join(COMMANDS)} of the shell bash, zsh or fish: "
            f"-sc install=bash; {given!r} was given; {_REMEDY}"
        )
    if is_query(words) and LINE not in os.environ:
        raise ConfigError(f"-sc {words[0]} is for the shell itself, which sets {LINE}; {_REMEDY}")


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Print what the block prints; nothing where it fails, whatever the reason."""
    written = io.StringIO()
    try:
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(io.StringIO()):
            yield
    except (Exception, SystemExit):  # noqa: BLE001 - see the module
        return
    print(visible(written.getvalue()), end="")

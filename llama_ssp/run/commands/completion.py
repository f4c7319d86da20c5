"""Completion of names with Tab, by Hydra and with checks of ours: `eval "$(llama-ssp run -sc install=bash)"`.

The shell's script calls `llama-ssp -sc query=bash` at every Tab, without the command; `python launch/run.py -sc
install=bash` prints a script for that program. A line that Hydra cannot read yields no candidates: any other output
would land in the middle of what the user is typing.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence

import hydra

from llama_ssp.errors import ConfigError
from llama_ssp.settings import catalogue
from llama_ssp.settings.compose import register
from llama_ssp.words import visible

_COMMANDS, _SHELLS = ("install", "uninstall", "query"), ("bash", "zsh", "fish")
LINE = "COMP_LINE"
"""Environment variable in which the shell passes the line being typed."""
_REMEDY = 'eval "$(llama-ssp run -sc install=bash)" completes names with Tab'


def read_line(line: str) -> tuple[str, str | None]:
    """Return the command of a line of `llama-ssp`, and its settings after it; None while the command is being typed.

    `ranks=` is left out, since Hydra does not know it.
    """
    _, _, words = line.lstrip().partition(" ")
    command, space, settings = words.lstrip().partition(" ")
    return command, re.sub(r"(?:^| )ranks=\S*(?= )", "", settings) if space else None


def answer(words: Sequence[str]) -> None:
    """Let Hydra print a script, or candidates for the shell.

    Raises ConfigError for words (the command line without options) that Hydra would answer with a traceback.
    """
    if len(words) != 1 or words[0] not in {f"{command}={shell}" for command in _COMMANDS for shell in _SHELLS}:
        given = " ".join(words) or "nothing"
        raise ConfigError(
            f"--shell-completion (-sc) needs one of {', '.join(_COMMANDS)} for the shell bash, zsh or fish, such as "
            f"-sc install=bash; {given!r} was given; {_REMEDY}"
        )
    if words[0].startswith("query=") and LINE not in os.environ:
        raise ConfigError(f"-sc {words[0]} is called by the shell itself, which sets {LINE}; {_REMEDY}")
    register()
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(io.StringIO()):
        try:
            sys.argv[1:] = ["--shell-completion", *words]
            hydra.main(config_path=str(catalogue.conf_dir()), config_name="config", version_base="1.3")(
                lambda _: None
            )()
        except (Exception, SystemExit):  # noqa: BLE001 - see the module
            written.truncate(0)
    print(visible(written.getvalue()), end="")

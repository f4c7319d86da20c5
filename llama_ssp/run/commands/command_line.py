"""The options of `llama-ssp run`, such as `-m` and `--help`; all other words are settings."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from llama_ssp.errors import ConfigError
from llama_ssp.settings import folders


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage."""
        hint = "settings are written name=value, for example model=7B, and --help all lists them"
        raise ConfigError(f"{message}: {hint}")


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options and the `words`; raises ConfigError for bad options.

    The folder of `--config-dir` is searched from now on.
    """
    parser = _Parser(add_help=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("--resolve", action="store_true")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("-m", "--multirun", action="store_true")
    kinds.add_argument("-c", "--cfg", choices=["job"])
    kinds.add_argument("-sc", "--shell-completion", "--shell_completion", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    folders.use(options.config_dir)
    if options.resolve and not (options.cfg or options.help):
        raise ConfigError("--resolve needs --cfg: --cfg job --resolve")
    return options

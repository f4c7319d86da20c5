"""Code from outside the package that adds to it: modules that the user names in the environment.

A plugin is a module on PYTHONPATH that calls `config.tasks.spec.register` or `architectures.family.register`. It is
imported before torch is, so it imports torch only in the functions that need it.
"""

import importlib
import os

from llama_ssp.errors import ConfigError, SspError

PLUGINS = "LLAMA_SSP_PLUGINS"
"""Variable that names the modules, separated by commas."""


def load_plugins() -> None:
    """Import the plugins; must precede `store.register`, and may be repeated.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
        try:
            importlib.import_module(name)
        except SspError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{PLUGINS} names {name}, which cannot be imported ({type(error).__name__}: {reason}): "
                "give modules that are on PYTHONPATH, separated by commas"
            ) from error

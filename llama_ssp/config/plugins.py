"""Loads plugins: modules outside the package that the user names in an environment variable.

A plugin is a module on PYTHONPATH that calls `config.tasks.spec.register` or `architectures.family.register`. It is
imported before torch, so it must import torch only inside the functions that need it.
"""

import importlib
import os

from llama_ssp.errors import ConfigError, SspError

PLUGINS = "LLAMA_SSP_PLUGINS"
"""Environment variable with the module names, separated by commas."""


def load_plugins() -> None:
    """Import the plugins, or raise ConfigError. Call before `store.register`; repeated calls are harmless."""
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

"""Speculative sampling on models that are too large for one GPU.

`load` and `plan` serve a notebook without a configuration file; `llama-ssp` is the program. Both are imported on first
use, so that planning works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_ssp.api.loading import load
    from llama_ssp.api.pair import Completion, Pair
    from llama_ssp.api.planning import plan

__all__ = ["Completion", "Pair", "load", "plan"]
_MODULES = {"Completion": "pair", "Pair": "pair", "load": "loading", "plan": "planning"}


if not TYPE_CHECKING:  # checkers of types would find any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        return getattr(import_module(f"llama_ssp.api.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

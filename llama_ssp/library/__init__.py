"""The library for notebooks: load a pair of models, complete prompts, plan jobs. One process, no configuration files.

Its names are imported on first use, so that `plan` works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_ssp.library.completion import Completion
    from llama_ssp.library.loading import load
    from llama_ssp.library.pair import Pair, speculative_generate
    from llama_ssp.library.planning import compare_machines, plan

__all__ = ["Completion", "Pair", "compare_machines", "load", "plan", "speculative_generate"]
_MODULES = {
    "Completion": "completion", "Pair": "pair", "compare_machines": "planning", "load": "loading", "plan": "planning",
    "speculative_generate": "pair",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

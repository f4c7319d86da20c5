"""Speculative sampling on models that are too large for one GPU.

`load`, `plan` and `compare_machines` serve a notebook without a configuration file; `llama-ssp` is the program. All are
imported on first use, so that planning works without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_ssp.library import Completion, Pair, compare_machines, load, plan, speculative_generate

__all__ = ["Completion", "Pair", "compare_machines", "load", "plan", "speculative_generate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from llama_ssp import library  # noqa: PLC0415 - torch must not be imported with the package

    return getattr(library, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

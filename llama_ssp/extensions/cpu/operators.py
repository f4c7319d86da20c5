"""Chooses between an operator that is compiled for this CPU and its reference."""

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

import torch
from torch import Tensor

from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.storage.formats import Product

Operator = Callable[..., Tensor]

_log = logging.getLogger(__name__)
_library = torch.library.Library("llama_ssp", "FRAGMENT")


def find_operator(
    signature: str,
    emitter: str,
    *kinds: str | int | Product,
    entry: str,
    shared: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    check: Callable[[Operator], None],
    instead: str,
) -> Operator | None:
    """Compile an operator, and compare it with its reference; returns None if this CPU cannot use it.

    There is no warning if the CPU lacks the instructions. There is one if llvmlite is missing or the operator is wrong.

    Args:
        signature: name and arguments, as `torch.library` takes them.
        emitter: the module of `code` whose `emit` writes the code.
        kinds: arguments of `emit`.
        entry: the function of the code that torch calls.
        shared: functions that operators compiled later may call; see `compiled.add_operator`.
        needs: instructions, by LLVM's names.
        check: raises RuntimeError if the operator's results are not its reference's.
        instead: says what the run does without the operator; a clause.
    """
    name = signature.partition("(")[0]
    try:
        from llama_ssp.extensions.cpu.code import compiled

        if not has_features(needs):
            return None
        if not hasattr(torch.ops.llama_ssp, name):
            _library.define(signature)
        emit = import_module(f"{__package__}.code.{emitter}").emit
        compiled.add_operator(name, partial(emit, *kinds), entry, shared=shared, key=repr(kinds))
        operator: Operator = getattr(torch.ops.llama_ssp, name).default
        check(operator)
    except ModuleNotFoundError:
        _say_what_is_missing()
        return None
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        _log.warning("continuing %s, which is slower: %s", instead, reason)
        return None
    return operator


@cache
def _say_what_is_missing() -> None:
    _log.warning("continuing without llvmlite, which is slower: pip install llvmlite, or the extra `cpu`, brings it")

"""Triton's interpreter, without what takes it most of its time and changes no value."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Do once what the interpreter does for each call of a function, or for each of its operators."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    # Without `debug` it only computes whether a sum of integers overflows, and tells nobody.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _once(patch_language: Callable[..., object]) -> Callable[..., object]:
    """Let the operators of each module of the language be the interpreter's from the first call on, for ever."""
    patched: set[str] = set()

    def patch(function: Any) -> object:
        seen = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
        if not seen <= patched:
            patch_language(function)
            patched.update(seen)
        return SimpleNamespace(restore=lambda: None)

    return patch


def _remembered(find: Callable[..., object]) -> Callable[..., object]:
    """NumPy's type for each type of Triton, by its name."""
    known: dict[str, object] = {}

    def found(dtype: Any) -> object:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return found

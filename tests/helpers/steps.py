"""Counts what reading a text takes: calls of functions, and characters that methods and expressions look at."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re

_METHODS = (
    "__add__",
    "__contains__",
    "__getitem__",
    "count",
    "endswith",
    "find",
    "index",
    "lstrip",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rstrip",
    "split",
    "startswith",
    "strip",
)


class Steps:
    """Numbers of calls, and of characters that were looked at.

    Attributes:
        text: makes a text whose methods and sums count.
    """

    def __init__(self) -> None:
        self.num_calls = self.num_chars = 0
        methods: dict[str, Any] = {name: self._counted(name) for name in _METHODS}
        self.text: Any = type("Counted", (str,), methods | {"__radd__": lambda text, lead: self.text(lead) + text})

    @property
    def total(self) -> int:
        """All steps."""
        return self.num_calls + self.num_chars

    def _counted(self, name: str) -> Callable[..., Any]:
        method = getattr(str, name)

        def count(text: str, *arguments: Any) -> Any:
            found = method(text, *arguments)
            first = next((one for one in arguments[1:] if isinstance(one, int)), 0)
            if name in {"startswith", "endswith", "__getitem__"}:
                self.num_chars += len(found) if isinstance(found, str) else len(arguments[0])
            else:
                self.num_chars += (found if isinstance(found, int) and found >= first else len(text)) - first
            return self.text(found) if isinstance(found, str) else found

        return count

    def pattern(self, pattern: "re.Pattern[str]") -> SimpleNamespace:
        """A compiled expression that counts the characters up to the end of what it finds, or of the text."""

        def counted(name: str) -> Callable[..., Any]:
            def find(text: str, at: int = 0) -> Any:
                found = getattr(pattern, name)(text, at)
                self.num_chars += (found.end() if found else len(text)) - at
                return found

            return find

        return SimpleNamespace(search=counted("search"), match=counted("match"))

    def raw_decode(self, text: str, at: int) -> tuple[Any, int]:
        """As that of `json.JSONDecoder`."""
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except json.JSONDecodeError as error:
            self.num_chars += (len(text) if error.msg.startswith("Unterminated") else error.pos) - at
            raise
        self.num_chars += end - at
        return found, end

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of a block."""

        def count(_frame: object, event: str, _argument: object) -> None:
            self.num_calls += event in {"call", "c_call"}

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)

"""Fields of settings: a dataclass field with the help that `--help` and the reference on the site show."""

from collections.abc import Callable
from dataclasses import Field, field, replace
from typing import Any, TypeVar, cast

_T = TypeVar("_T")
_HELP = "help"


def setting(default: _T, said: str) -> _T:
    """A field with a default and its help."""
    return field(default=default, metadata={_HELP: said})


def made(make: Callable[[], _T], said: str) -> _T:
    """A field whose default is made for each object, with its help."""
    return field(default_factory=make, metadata={_HELP: said})


def required(said: str) -> Any:  # noqa: ANN401 - as `dataclasses.field`
    """A field without a default, with its help."""
    return field(metadata={_HELP: said})


def with_value(settings: _T, key: str, value: object) -> _T:
    """A copy of settings in which one, such as `sampling.top_k`, has another value."""
    name, _, rest = key.partition(".")
    found: Any = settings
    return cast("_T", replace(found, **{name: with_value(getattr(found, name), rest, value) if rest else value}))


def help_of(entry: Field[Any]) -> str:
    """The help of a field; empty if it has none."""
    return str(entry.metadata.get(_HELP, ""))

"""Settings that extensions add to the groups of the core, such as `timeouts`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, cast

from llama_ssp.registry import Registry

Range = tuple[str, Callable[[Any], bool], str]
"""A condition on a number: its key, what must hold, and what is required in words; a missing or null value passes."""


@dataclass(frozen=True, kw_only=True)
class MoreSettings:
    """Settings that an extension adds to a group of the core, or to plans: `config` extends the group's dataclass.

    Attributes:
        after: the setting of the group that these follow in help; empty for the group's last one.
        paths: settings that are paths, which the command line does not parse.
        draw: for plans, `module:function` that draws a plan or a search into the file that a setting of `paths` names.
        choose: for plans, `module:function` that chooses among layouts from the config, the machine and the given
            words, and shows the result. The setting with the record's name asks for it.
        example: a command line of `llama-ssp plan --help`.
        ranges: conditions on numbers, by dotted key.
        changeable: settings that may change when a run is resumed, because no completion depends on them.
        readers: for arguments of the library that are neither numbers nor texts: a function that returns None for a
            value of a wrong type, and words for what is wanted.
    """

    name: str
    config: type
    after: str = ""
    paths: tuple[str, ...] = ()
    draw: str = ""
    choose: str = ""
    example: str = ""
    ranges: tuple[Range, ...] = ()
    changeable: tuple[str, ...] = ()
    readers: Mapping[str, tuple[Callable[[Any], object], str]] = field(default_factory=dict)


MORE: Registry[MoreSettings] = Registry(setting="group", kind=MoreSettings)


@cache
def whole(group: type) -> type:
    """A dataclass of settings, with the settings that extensions add to it."""
    more = [record for record in MORE.all().values() if group in record.config.__bases__]
    if not more:
        return group
    bases = (*(record.config for record in reversed(more)), group)
    found: Any = dataclass(kw_only=True)(type(group.__name__, bases, {"__doc__": group.__doc__}))
    order = [entry.name for entry in fields(group)]
    for record in more:
        place = order.index(record.after) + 1 if record.after else len(order)
        order[place:place] = [entry.name for entry in fields(record.config) if entry.name not in order]
    found.__dataclass_fields__ = {name: found.__dataclass_fields__[name] for name in order}
    return cast("type", found)


def ranges() -> list[Range]:
    """The conditions on the numbers of settings that extensions add."""
    return [*chain.from_iterable(map(attrgetter("ranges"), MORE.all().values()))]


def chooser_of(config: object) -> MoreSettings | None:
    """The record that chooses among layouts in place of a plan of one; None if the config asks for none."""
    return next((more for more in MORE.all().values() if more.choose and getattr(config, more.name, False)), None)

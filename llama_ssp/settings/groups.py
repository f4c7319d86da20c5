"""Settings that rooms add to the groups of the core, such as `timeouts`."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from llama_ssp.registry import Registry

if TYPE_CHECKING:
    from llama_ssp.settings.tasks import Range


@dataclass(frozen=True, kw_only=True)
class MoreSettings:
    """Settings of a room in a group of the core, or of a plan: `config` is a dataclass derived from the group's.

    Attributes:
        paths: settings that are paths, which the command line does not parse.
        draw: of plans, `module:function` that draws a plan or a search into the file that each of the paths names.
        choose: of plans, `module:function` that chooses among layouts from the config, the machine and the given words,
            and shows what it has found. The setting with the record's name asks for it.
        example: a command line of `llama-ssp plan --help`.
        after: the setting of the group that they follow; by default they follow all.
        ranges: what their numbers must be, by whole keys.
    """

    name: str
    config: type
    paths: tuple[str, ...] = ()
    draw: str = ""
    choose: str = ""
    example: str = ""
    after: str = ""
    ranges: "tuple[Range, ...]" = ()


MORE: Registry[MoreSettings] = Registry(setting="group", kind=MoreSettings)


@cache
def whole(group: type) -> type:
    """A dataclass of settings, with the settings that rooms add to it."""
    records = [record for record in MORE.all().values() if record.config.__base__ in group.__mro__]
    if not records:
        return group
    more = [record.config for record in reversed(records)]
    of_group = [config for config in more if config.__base__ is group]
    bases = (*of_group, group, *(config for config in more if config not in of_group))  # a group's defaults win
    made: Any = dataclass(kw_only=True)(type(group.__name__, bases, {"__doc__": group.__doc__}))
    for record in filter(lambda record: record.after, records):
        own = vars(record.config)["__annotations__"]
        names = [name for name in made.__dataclass_fields__ if name not in own]
        place = names.index(record.after) + 1
        ordered = (*names[:place], *own, *names[place:])
        made.__dataclass_fields__ = {name: made.__dataclass_fields__[name] for name in ordered}
    return cast("type", made)


def ranges() -> "list[Range]":
    """What numbers of the settings must be that rooms add."""
    return [found for more in MORE.all().values() for found in more.ranges]


def chooser_of(config: object) -> MoreSettings | None:
    """What chooses among layouts in place of a plan of one; None if nothing was asked to."""
    return next((more for more in MORE.all().values() if more.choose and getattr(config, more.name, False)), None)

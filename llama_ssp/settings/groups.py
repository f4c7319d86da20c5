"""Settings that rooms add to the groups of the core, such as `timeouts`."""

from dataclasses import dataclass
from functools import cache

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class MoreSettings:
    """Settings of a room in a group of the core, or of a plan: `config` is a dataclass derived from the group's.

    Attributes:
        paths: settings that are paths, which the command line does not parse.
        draw: of plans, `module:function` that draws a plan or a search into the file that each of the paths names.
        choose: of plans, `module:function` that chooses among layouts from the config, the machine and the given words,
            and shows what it has found. The setting with the record's name asks for it.
        example: a command line of `llama-ssp plan --help`.
    """

    name: str
    config: type
    paths: tuple[str, ...] = ()
    draw: str = ""
    choose: str = ""
    example: str = ""


MORE: Registry[MoreSettings] = Registry(setting="group", kind=MoreSettings)


@cache
def whole(group: type) -> type:
    """A dataclass of settings, with the settings that rooms add to it."""
    more = [record.config for record in MORE.all().values() if issubclass(record.config, group)]
    if not more:
        return group
    return dataclass(kw_only=True)(type(group.__name__, (*reversed(more), group), {"__doc__": group.__doc__}))


def chooser_of(config: object) -> MoreSettings | None:
    """What chooses among layouts in place of a plan of one; None if nothing was asked to."""
    return next((more for more in MORE.all().values() if more.choose and getattr(config, more.name, False)), None)

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
    """

    name: str
    config: type
    paths: tuple[str, ...] = ()
    draw: str = ""


MORE: Registry[MoreSettings] = Registry(setting="group", kind=MoreSettings)


@cache
def whole(group: type) -> type:
    """A dataclass of settings, with the settings that rooms add to it."""
    more = [record.config for record in MORE.all().values() if issubclass(record.config, group)]
    if not more:
        return group
    return dataclass(kw_only=True)(type(group.__name__, (*more, group), {"__doc__": group.__doc__}))

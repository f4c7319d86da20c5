"""Settings that rooms add to the groups of the core, such as `timeouts`."""

from dataclasses import dataclass
from functools import cache

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class MoreSettings:
    """Settings of a room in a group of the core: `config` is a dataclass derived from the group's."""

    name: str
    config: type


MORE: Registry[MoreSettings] = Registry(setting="group", kind=MoreSettings)


@cache
def whole(group: type) -> type:
    """A dataclass of settings, with the settings that rooms add to it."""
    more = [record.config for record in MORE.all().values() if issubclass(record.config, group)]
    if not more:
        return group
    return dataclass(kw_only=True)(type(group.__name__, (*more, group), {"__doc__": group.__doc__}))

"""Records of code that loads a pair outside of the process that calls `load`. Imports no torch."""

from dataclasses import dataclass

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """One way to load a pair outside of the calling process.

    Attributes:
        name: the argument of `load` that asks for it.
        load: `module:function` that takes this argument and a mapping of all others, and returns a `Pair`.
    """

    name: str
    load: str


ELSEWHERE: Registry[Elsewhere] = Registry(setting="argument", kind=Elsewhere)

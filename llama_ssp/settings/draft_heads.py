"""Draft heads as the core knows them: drafts that read hidden states of their target, the taps, and are no models.

A record says how a kind of head is recognized, read and refused; its code is imported by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import CheckpointError
from llama_ssp.manifest import absent
from llama_ssp.registry import Registry

Field = Callable[[str], Any]
"""Gives a field of a config by name."""


class HeadFile(Protocol):
    """The config.json of a head, as read."""

    @property
    def source(self) -> str:
        """`module:function` that makes the `weights.source.TapSource` of the head's files and of its target."""

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The fields that the config.json of a model with the head's layers would have."""

    def shape_over(self, layers: ModelShape) -> ModelShape:
        """The sizes of the head, from the sizes of that model."""


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A kind of draft head.

    Attributes:
        name: the name of the kind; for a head in the files of its target, the entry that `draft=` names.
        read_config: reads the config.json of a head with files of its own; returns None for the config.json of a model,
            and raises CheckpointError for a head that cannot be read.
        in_target: the name of the head's layers in the files of its target; empty for a head with files of its own. The
            attributes below are for heads in the target's files.
        source: `module:function` that makes its `weights.source.TapSource`, from None and the target's source.
        other_names: names that other engines give the entry.
        families: the families of targets that can have it.
        lacks: returns a sentence for a target without it, which is given as a setting or a folder.
        is_in: returns whether a target has it, from the target's config.
        check: raises ConfigError unless the config describes such layers; also takes the target's name for messages.
        describe: `module:function` that reads the sizes of the head from the folder of its target.
        synthesize: `module:function` that makes the source of a head from a target's `weights.source.MadeSource`, the
            sizes of the head and the agreement.
    """

    name: str
    read_config: Callable[[Mapping[str, Any], Path], HeadFile | None] = lambda _content, _file: None
    in_target: str = ""
    source: str = ""
    other_names: frozenset[str] = frozenset()
    families: tuple[str, ...] = ()
    lacks: Callable[[object], str] = str
    is_in: Callable[[Field], bool] = lambda _field: False
    check: Callable[[Field, object], None] = lambda _field, _where: None
    describe: str = ""
    synthesize: str = ""


HEADS: Registry[DraftHead] = Registry(setting="draft", kind=DraftHead)


def head_file(content: Mapping[str, Any], file: Path) -> HeadFile | None:
    """Read the config.json of a head; None for a model's, CheckpointError for a head of a kind that is not read."""
    found = (kind.read_config(content, file) for kind in HEADS.all().values())
    head = next(filter(None, found), None)
    missing = next(filter(None, (absent("config.json", name) for name in content)), None)
    if head is None and missing:
        raise CheckpointError(f"{file} describes a draft head, and {missing}")
    return head


def head_in_target(entry: str | None) -> DraftHead | None:
    """The kind of head that an entry stands for if it lies in the files of the target."""
    found = HEADS.find(entry) if entry else None
    return found if found and found.in_target else None


def heads_in_targets() -> list[DraftHead]:
    """The kinds of heads that lie in the files of their targets."""
    return [kind for kind in HEADS.all().values() if kind.in_target]

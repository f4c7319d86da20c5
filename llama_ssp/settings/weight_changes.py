"""Changes of a model's weights while they are read, from files of their own, which extensions and plugins add."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llama_ssp.catalogue import ModelConfig
from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class WeightChange:
    """A change of a model's weights.

    Attributes:
        name: the setting of a model that gives the folder of the change's files, or their id on the hub.
        config: the file that describes the change.
        weights: the file of its tensors.
        alone: returns a sentence for a folder or an id that was given as a model but has only such files; also takes
            the `config` there.
        apply: `module:function` that takes a `Checkpoint` and the folder, and returns the changed checkpoint; raises
            CheckpointError.
    """

    name: str
    config: str
    weights: str
    alone: Callable[[str, Path], str]
    apply: str


CHANGES: Registry[WeightChange] = Registry(setting="model", kind=WeightChange)


def changes_of(model: ModelConfig) -> list[tuple[WeightChange, str]]:
    """The changes of a model, each with its folder or id."""
    given = [(change, getattr(model, change.name, None)) for change in CHANGES.all().values()]
    return [(change, place) for change, place in given if place is not None]

"""The records of constraints, which say what a text may go on with, such as a grammar."""

from collections.abc import Callable
from dataclasses import dataclass

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ConstraintRecord:
    """A kind of constraint.

    Attributes:
        is_asked: returns whether a `SamplingConfig` asks for one of this kind.
        prepare: `module:function` that takes the sampling and the vocabulary, and returns a function that begins the
            `speculate.engine.masks.Constraint` of a new text. Preparing may take seconds, beginning may not. Raises
            ConfigError if what the sampling asks for is not possible.
    """

    name: str
    is_asked: Callable[[object], object]
    prepare: str


CONSTRAINTS: Registry[ConstraintRecord] = Registry(setting="sampling", kind=ConstraintRecord)


def constraint_asked(sampling: object) -> ConstraintRecord | None:
    """The constraint that sampling asks for; None for none."""
    return next((record for record in CONSTRAINTS.all().values() if record.is_asked(sampling)), None)

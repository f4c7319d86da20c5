"""The records of constraints, which say what a text may go on with, such as a grammar."""

from collections.abc import Callable
from dataclasses import dataclass

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ConstraintRecord:
    """A kind of constraint.

    Attributes:
        is_asked: whether a `SamplingConfig` has one of this kind.
        begin: `module:function` that gets the sampling and the vocabulary, and returns the
            `speculate.engine.masks.Constraint` of a new text; ConfigError refuses what is asked for.
    """

    name: str
    is_asked: Callable[[object], object]
    begin: str


CONSTRAINTS: Registry[ConstraintRecord] = Registry(setting="sampling", kind=ConstraintRecord)


def constraint_asked(sampling: object) -> ConstraintRecord | None:
    """The constraint that sampling asks for; None for none."""
    return next((record for record in CONSTRAINTS.all().values() if record.is_asked(sampling)), None)

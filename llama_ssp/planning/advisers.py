"""The records of advisers, which say what would be better than a plan, or would fit where it does not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llama_ssp.registry import Registry, imported

if TYPE_CHECKING:  # records are read before anything is planned
    from llama_ssp.machines.hardware import HardwareConfig
    from llama_ssp.planning.memory import RankMemoryPlan
    from llama_ssp.planning.spec import PlanSpec
    from llama_ssp.planning.timing import Timing


class ChangeOfPlan(Protocol):
    """A change that would fit."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings to add to the command line."""

    @property
    def fullest(self) -> "RankMemoryPlan":
        """The fullest rank."""

    @property
    def timed(self) -> "Timing":
        """The times of a completion."""

    def document(self) -> dict[str, Any]:
        """Its fields in the document of a plan."""


@dataclass(frozen=True, kw_only=True)
class Adviser:
    """One adviser; each attribute names code as `module:function`, which takes a spec and a machine.

    Attributes:
        warnings: yields sentences on choices that cost more than they gain; also takes the times.
        notes: yields other sentences; also takes the times.
        changes: returns changes that make a plan fit, the best first; called only if the plan does not fit.
    """

    name: str
    order: int = 0
    warnings: str = ""
    notes: str = ""
    changes: str = ""


ADVISERS: Registry[Adviser] = Registry(setting="plan", modules=("llama_ssp.planning.notes",), kind=Adviser)


def said(kind: str, spec: "PlanSpec", hardware: "HardwareConfig", timed: "Timing") -> Iterator[str]:
    """Yield the warnings or notes of all advisers."""
    for one in ADVISERS.all().values():
        if code := getattr(one, kind):
            yield from imported(code, setting="plan")(spec, hardware, timed)


def changes_of(spec: "PlanSpec", hardware: "HardwareConfig") -> tuple[ChangeOfPlan, ...] | None:
    """The changes that make a plan fit, the best first; None if no adviser tries any."""
    found = [one.changes for one in ADVISERS.all().values() if one.changes]
    return tuple(way for code in found for way in imported(code, setting="plan")(spec, hardware)) if found else None

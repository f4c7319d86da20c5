"""Processors of logits that one number sets: filters, which leave some tokens, and penalties, which change logits.

Each module of this folder has the record of one, with all that others read of it: the ranges of settings, requests of
a server, the audit, finished texts, comparisons with transformers, and the laws of a run and of rows with settings of
their own. Its number is the field of `SamplingConfig` with its name (docs/extending.md, "A filter").

Records import no torch: their functions call methods of tensors. The number of a run is a Python number; the numbers of
rows are a tensor (B, 1, 1), in fp64, without rows in which the filter is off.

Shapes: B sequences, T scored positions, V vocabulary; `...` stands for any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from llama_ssp.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor


_Some = TypeVar("_Some", bound="Processor")


class Candidates(Protocol):
    """The tokens that a filter chooses from.

    Attributes:
        logits: (..., V), after penalties and temperature; minus infinity where a mask or a ban forbids a token.
        probs: (..., V), of the tokens that earlier filters have left; they sum to 1.
    """

    logits: Tensor
    probs: Tensor

    def first(self, number: float | Tensor) -> Tensor:
        """Whether a token is among the `number` most probable ones; tokens that tie with the last one count too."""

    def mass_before(self) -> Tensor:
        """The probability, fp64, of all tokens before each one, by descending logits."""


class Counts(Protocol):
    """How often each token of the vocabulary occurs before each scored position: fp32 (B, T, V)."""

    def of_text(self) -> Tensor:
        """The counts in the new tokens alone."""

    def of_all(self) -> Tensor:
        """The counts in the prompt and the new tokens."""


class InTransformers(NamedTuple):
    """The counterpart of a processor in transformers: its class, and the argument of `generate` with the same name.

    Attributes:
        warper: the name of the class.
        default: default of the argument.
        off: value of the argument that switches the processor off.
    """

    warper: str
    default: float | None
    off: float | None


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor.

    Attributes:
        name: the name of its setting, of the argument of `Pair.generate`, and of the field of a request.
        order: filters and penalties are applied in this order.
        off: the number that changes nothing; a setting may also be None.
        also_off: more numbers by which requests can switch it off.
        allows: returns whether a setting may have a number.
        required: the allowed numbers in words, with `{null}` for no number.
        in_transformers: None if transformers has no such processor.
        audited: a number whose effect shows in a few hundred tokens; None if an audit does not ask for the processor,
            since hardly any server has it.
    """

    name: str
    order: int
    off: float
    also_off: tuple[float, ...] = ()
    allows: Callable[[float], bool]
    required: str
    in_transformers: InTransformers | None = None
    audited: float | None = None


@dataclass(frozen=True, kw_only=True)
class Filter(Processor):
    """A processor that gives some tokens probability 0.

    Attributes:
        keep: returns whether each token (..., V) is kept; at least one is.
        reads_logits: whether `keep` reads more of the candidates than `probs`; the rest may be missing otherwise.
    """

    keep: Callable[[Candidates, float | Tensor], Tensor]
    reads_logits: bool = True


@dataclass(frozen=True, kw_only=True)
class Penalty(Processor):
    """A processor of the model's logits (B, T, V), before the temperature, that counts tokens.

    Attributes:
        change: returns the changed logits.
    """

    change: Callable[[Tensor, Counts, float | Tensor], Tensor]


PROCESSORS: Registry[Processor] = Registry(setting="sampling", modules=(__name__,), kind=Processor)


@cache
def filters() -> tuple[Filter, ...]:
    """All filters, in their order."""
    return tuple(one for one in PROCESSORS.all().values() if isinstance(one, Filter))


@cache
def penalties() -> tuple[Penalty, ...]:
    """All penalties, in their order."""
    return tuple(one for one in PROCESSORS.all().values() if isinstance(one, Penalty))


def numbers_of(sampling: object, some: Iterable[_Some]) -> list[tuple[_Some, float]]:
    """Return those of the given processors that a `SamplingConfig` switches on, with their numbers."""
    found = list[tuple[_Some, float]]()
    for one in some:  # every call comes here several times
        value = getattr(sampling, one.name)
        if value is not None and value != one.off:
            found.append((one, value))
    return found


@cache
def from_transformers() -> dict[str, float | None]:
    """Settings of `sampling` that a generation_config.json can have, with the defaults of transformers."""
    found: dict[str, float | None] = {"temperature": 1.0}
    for one in PROCESSORS.all().values():
        if known := one.in_transformers:
            found[one.name] = known.default
    return found


def in_dtype(number: float | Tensor, other: Tensor) -> float | Tensor:
    """A number, or a tensor with a number for each row, in the number format of another tensor."""
    return number if isinstance(number, int | float) else number.to(other.dtype)

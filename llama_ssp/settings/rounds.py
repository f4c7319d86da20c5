"""Kinds of rounds: how drafting and verification take turns. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from llama_ssp.registry import Registry
from llama_ssp.settings.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A kind of round.

    Attributes:
        order: if a config asks for two kinds, the kind with the smaller number is taken.
        is_asked: returns whether the rounds of a decoder with a draft are of this kind.
        make: `module:function` that makes a `speculate.engine.round.Round` of the target and the drafters, with the
            arguments of its constructor.
    """

    name: str
    order: int = 100
    is_asked: Callable[[RunConfig], bool]
    make: str


ROUNDS: Registry[RoundRecord] = Registry(setting="speculation", modules=(__name__,), kind=RoundRecord)

OVERLAPPED = RoundRecord(
    name="overlap",
    is_asked=lambda config: config.speculation.overlap,
    make="llama_ssp.speculate.engine.overlap:make_round",
)
IN_TURN = RoundRecord(
    name="in turn", order=1000, is_asked=lambda _: True, make="llama_ssp.speculate.engine.round:Round"
)


def round_of(config: RunConfig, *, speculative: bool) -> RoundRecord:
    """The kind of round of a decoder; plain decoding has ordinary rounds, since there is no draft to overlap with."""
    return next(one for one in ROUNDS.all().values() if one is IN_TURN or (speculative and one.is_asked(config)))

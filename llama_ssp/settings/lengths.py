"""Records of what may choose K, the drafted tokens of a round, in place of one number: checks, plans and runs ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llama_ssp.catalogue import ModelShape
from llama_ssp.registry import Registry
from llama_ssp.text.messages import listed, said


def fastest(seconds: Mapping[int, float]) -> int:
    """The K that takes the fewest seconds per token."""
    return min(seconds, key=seconds.__getitem__)


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthChooser:
    """One way to choose K for each round; 0 is a plain round.

    Attributes:
        name: value of `speculation.num_draft_tokens`.
        purpose: what the chooser does, as `--help` says.
        lengths: returns the values of K above 0 to choose from, given the shape of the draft's model, or None for a
            draft without a model.
        make: `module:function` that makes a `speculate.engine.lengths.FixedLength` for a decoder, once and on all
            ranks, from decoder, config, `num_slots` in the middle of the longest text, `comm`, and the run's `folder`
            or None.
        simulate: `module:function` that makes the same from the costs of rounds by `DraftChoice`, and the `acceptance`
            that is expected of each drafter; None if these do not suffice.
        priced: returns the K whose rounds a plan prices, given the seconds per token by K.
        finds_best: whether the chooser finds the K with the most tokens per second, and drafts nothing where drafts
            cost more than they gain. Plans then expect no run to be slower than plain decoding, and name the chooser
            where they cannot tell the best K.
    """

    name: str
    purpose: str
    lengths: Callable[[ModelShape | None], tuple[int, ...]]
    make: str
    simulate: str | None = None
    priced: Callable[[Mapping[int, float]], int] = fastest
    finds_best: bool = False


CHOOSERS: Registry[LengthChooser] = Registry(setting="speculation.num_draft_tokens", kind=LengthChooser)
register = CHOOSERS.register


def chooser_named(number: int | str) -> LengthChooser | None:
    """The record of this name; None for a number, and for an unknown name."""
    return CHOOSERS.find(number) if isinstance(number, str) else None


def choosers_said() -> str:
    """Return the settings that let K be chosen for each round, in words; empty if no chooser is installed."""
    return listed([said(CHOOSERS.setting, name) for name in CHOOSERS.all()], "or")


def finder() -> LengthChooser | None:
    """The first chooser that finds the best K during a run, if there is one."""
    return next((one for one in CHOOSERS.all().values() if one.finds_best), None)


def longest(number: int | str, draft: ModelShape | None) -> int:
    """Return K, or the largest K that its chooser can choose; raises ConfigError for an unknown name."""
    return max(CHOOSERS.of(number).lengths(draft)) if isinstance(number, str) else number

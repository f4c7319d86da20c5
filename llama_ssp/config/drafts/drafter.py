"""What a kind of draft is: one record of facts, which the checks, the planner and `drafting.maker` read.

A kind lives in one module of this package, whose `DRAFTER` is its record. Code outside the package adds one with
`register`; an option `draft/NAME.yaml` with `kind: NAME` then chooses it. Nothing here imports torch: a record names
its code as `module:function`.
"""

from dataclasses import dataclass

from llama_ssp.config import drafts as package
from llama_ssp.config.registry import Registry
from llama_ssp.config.schema import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class DrafterRecord:
    """Facts about one kind of draft.

    Attributes:
        name: what `draft.kind` is set to.
        make: `module:function` that makes the drafter of a rank from `drafting.protocol.DrafterParts`; None drafts
            nothing.
        config: its settings, which `conf/draft/NAME.yaml` fills on top of `/schema/draft_NAME@_here_`.
        has_model: `draft.model` is loaded, and `placement.draft` says on which ranks. Without a model every rank
            drafts by itself, and all must draft the same ids.
        needs_hidden_states: it reads the target's hidden states.
    """

    name: str
    make: str | None
    config: type[DrafterConfig] = DrafterConfig
    has_model: bool = False
    needs_hidden_states: bool = False


DRAFTERS: Registry[DrafterRecord] = Registry(package.__name__, "DRAFTER", setting="draft.kind")
register, drafters, problem_of = DRAFTERS.register, DRAFTERS.all, DRAFTERS.problem_of


def drafter_of(draft: DrafterConfig) -> DrafterRecord:
    """The record of a draft.

    Raises:
        ConfigError: there is no such kind.
    """
    return DRAFTERS.of(draft.kind)


def drafts(draft: DrafterConfig) -> bool:
    """Whether anything is drafted."""
    return drafter_of(draft).make is not None


def draft_name(draft: DrafterConfig) -> str | None:
    """What reports call the draft: its model, else its kind; None for plain decoding."""
    if not drafts(draft):
        return None
    return draft.model.name if draft.model else draft.kind

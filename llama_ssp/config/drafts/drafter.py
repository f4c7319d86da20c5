"""Records of the kinds of draft (`config.registry`), which the checks, the planner and `drafting.maker` read.

An option `draft/NAME.yaml` with `kind: NAME` selects one.
"""

from dataclasses import dataclass

from llama_ssp.config import drafts as package
from llama_ssp.config.registry import Registry
from llama_ssp.config.schema import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class DrafterRecord:
    """One kind of draft.

    Attributes:
        name: value of `draft.kind`.
        make: `module:function` that makes a rank's drafter from `drafting.protocol.DrafterParts`; None drafts nothing.
        config: its settings; `conf/draft/NAME.yaml` has the values, on top of `/schema/draft_NAME@_here_`.
        has_model: `draft.model` is loaded on the ranks of `placement.draft`. Without a model every rank drafts by
            itself, and all must draft the same ids.
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
    """The record of a draft; an unknown kind raises ConfigError."""
    return DRAFTERS.of(draft.kind)


def drafts(draft: DrafterConfig) -> bool:
    """Whether anything is drafted."""
    return drafter_of(draft).make is not None


def draft_name(draft: DrafterConfig) -> str | None:
    """The draft's name in reports: its model, else its kind; None for plain decoding."""
    if not drafts(draft):
        return None
    return draft.model.name if draft.model else draft.kind

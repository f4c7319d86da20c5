"""Kinds of draft: their records and settings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from llama_ssp.fields import setting
from llama_ssp.groups import Range
from llama_ssp.registry import Registry
from llama_ssp.settings import schema
from llama_ssp.settings.schema import DrafterConfig, RunConfig
from llama_ssp.settings.tasks import NoEffect
from llama_ssp.settings.trees import TreeShape


class RoundSizes(Protocol):
    """The sizes of planned rounds, as `planning.spec.PlanSpec` has them."""

    @property
    def batch_size(self) -> int:
        """Rows of a replica."""

    @property
    def num_slots(self) -> int:
        """Cache slots of a row."""

    @property
    def tree(self) -> TreeShape | None:
        """The tree of a round; None for chains."""


@dataclass(frozen=True, kw_only=True)
class DraftTerms:
    """Terms of a plan on every rank for a draft without a model: kernels of a round, and bytes."""

    num_kernels: int = 0
    held_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class DrafterRecord:
    """One kind of draft."""

    name: str  # value of `draft.kind`.
    # `module:function` that makes a rank's drafter from `drafters.drafter.DrafterParts`; None drafts nothing.
    make: str | None
    # its settings; `conf/draft/NAME.yaml` has the values, on top of `/schema/draft_NAME@_here_`.
    config: type[DrafterConfig] = DrafterConfig
    # `draft.model` is loaded on the ranks of `placement.draft`; without a model every rank drafts the same ids by
    # itself.
    has_model: bool = False
    has_trees: bool = False  # it drafts what `DrafterParts.tree` says.
    # `module:function` that reads what it needs besides the models, once, when they are loaded, from its settings and
    # the target's tokenizer; `DrafterParts.prepared` has what it returns.
    prepare: str | None = None
    ranges: tuple[Range, ...] = ()  # of its settings, whose keys begin with `draft.`.
    # yields further problems of a run with such a draft, and a `NoEffect` for each setting that has none.
    problems: Callable[[RunConfig], Iterable[str | NoEffect]] = lambda _config: ()
    # without a model, what plans count for it, from its settings.
    terms: Callable[[Any, RoundSizes], DraftTerms] = lambda _draft, _round: DraftTerms()
    step_name: str = "draft"  # without a model, what it does in a round, in the table of a plan.
    # its settings with which it drafts from a row's own text alone.
    alone: Callable[[Any], Any] = lambda draft: draft
    # without a model, arguments of transformers' `generate`, which then drafts K tokens as it does; None for none.
    of_library: Callable[[Any, int], dict[str, object]] | None = None


DRAFTERS: Registry[DrafterRecord] = Registry(setting="draft.kind", kind=DrafterRecord)
register, drafters, problem_of = DRAFTERS.register, DRAFTERS.all, DRAFTERS.problem_of


def drafter_of(draft: DrafterConfig) -> DrafterRecord:
    """The record of a draft; an unknown kind raises ConfigError."""
    return DRAFTERS.of(draft.kind)


def of_kind(kind: str) -> DrafterConfig:
    """The settings of a kind of draft, all by default; an unknown kind raises ConfigError."""
    return DRAFTERS.of(kind).config(kind=kind)


def free_drafts() -> list[str]:
    """The kinds of draft without a model."""
    return [name for name, record in drafters().items() if record.make and not record.has_model]


def drafts(draft: DrafterConfig) -> bool:
    """Whether anything is drafted."""
    return drafter_of(draft).make is not None


def draft_name(draft: DrafterConfig) -> str | None:
    """The draft's name: its model's entry, else its kind; None for plain decoding."""
    if not drafts(draft):
        return None
    return draft.model.name if draft.model else draft.kind


def draft_label(draft: DrafterConfig) -> str | None:
    """The draft's name in reports, as `draft_name`, with the name of a model's folder."""
    return draft.model.label if draft.model else draft_name(draft)


class DraftTokenizer(Enum):
    """Whether the draft model must have the target's tokenizer, or has its own."""

    same = "same"
    own = "own"


@dataclass(kw_only=True)
class ModelDraftConfig(DrafterConfig):
    """The draft model and its tokenizer."""

    tokenizer: DraftTokenizer = setting(
        DraftTokenizer.same,
        "own allows a draft whose tokenizer is not the target's, which same refuses: it drafts among the tokens that "
        "both vocabularies have.",
    )
    greedy: bool = setting(
        False, "true drafts the most probable tokens at every temperature; the rules take them as certain."
    )


def drafts_greedily(draft: DrafterConfig) -> bool:
    """Whether a draft model takes its most probable tokens at every temperature."""
    return isinstance(draft, ModelDraftConfig) and draft.greedy


def has_own_tokenizer(draft: DrafterConfig) -> bool:
    """Whether a draft model has a tokenizer of its own."""
    return isinstance(draft, ModelDraftConfig) and draft.tokenizer is DraftTokenizer.own


register(DrafterRecord(name=schema.NO_DRAFT, make=None))
# Source: arXiv:2302.01318, arXiv:2211.17192; with a tokenizer of its own: arXiv:2502.05202.
_MAKE_MODEL = "llama_ssp.speculate.drafters.model:make"
register(
    DrafterRecord(name=schema.MODEL_DRAFT, make=_MAKE_MODEL, config=ModelDraftConfig, has_model=True, has_trees=True)
)

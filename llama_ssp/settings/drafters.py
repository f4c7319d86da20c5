"""Kinds of draft: their records and settings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from llama_ssp.registry import Registry
from llama_ssp.settings import schema
from llama_ssp.settings.extensions import Range, whole
from llama_ssp.settings.fields import setting
from llama_ssp.settings.rules import RULES
from llama_ssp.settings.schema import DrafterConfig, RunConfig
from llama_ssp.settings.tasks import NoEffect, draws_by_row
from llama_ssp.settings.trees import TreeShape
from llama_ssp.text.messages import said


class RoundSizes(Protocol):
    """The sizes of planned rounds, as `planning.spec.PlanSpec` has them."""

    @property
    def batch_size(self) -> int:
        """Rows of a replica."""

    @property
    def num_slots(self) -> int:
        """Cache slots of a row."""

    @property
    def num_target_layers(self) -> int:
        """Layers of the target."""

    @property
    def num_draft_tokens(self) -> int:
        """The most tokens that a round drafts, K."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary, V."""

    @property
    def tree(self) -> TreeShape | None:
        """The tree of a round; None for chains."""


@dataclass(frozen=True, kw_only=True)
class DraftTerms:
    """What a draft without a model adds to a plan on every rank: kernels of a round, bytes, and steps of the target.

    Attributes:
        read_bytes: bytes that the kernels of a round read and write, not counting draws from probabilities.
        layers: number of layers of the target, with its output, that each drafted token passes; 0 for none.
        seen_slots: slots of a row's cache that such a step reads; None for all.
        copied_slots: slots of a row that a round copies to a cache of the draft's own.
        copied_format: storage format of a second copy of the target's first `copied_layers` layers; None without one.
    """

    num_kernels: int = 0
    read_bytes: int = 0
    held_bytes: int = 0
    layers: int = 0
    seen_slots: int | None = None
    copied_slots: int = 0
    copied_format: str | None = None
    copied_layers: int = 0


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
    # without a model, it draws from a law, which every rank has whole; other such drafts are certain.
    draws: bool = False
    # without a model, it drafts with the target's own weights, whose logits its ranks then gather.
    reads_target: bool = False
    has_trees: bool = False  # it drafts what `DrafterParts.tree` says.
    # `module:function` that reads what it needs besides the models, once, when they are loaded, from its settings and
    # the tokenizers of the target and of a draft model; `DrafterParts.prepared` has what it returns.
    prepare: str | None = None
    # without a model, the storage format of a second copy of the target's first layers, and their number, from its
    # settings and the target's layers; `DrafterParts.prepared` is then that copy.
    copies: Callable[[Any, int], tuple[str, int] | None] = lambda _draft, _num_layers: None
    ranges: tuple[Range, ...] = ()  # of its settings, whose keys begin with `draft.`.
    # yields further problems of a run with such a draft, and a `NoEffect` for each setting that has none.
    problems: Callable[[RunConfig], Iterable[str | NoEffect]] = lambda _config: ()
    # without a model, what plans count for it, from its settings.
    terms: Callable[[Any, RoundSizes], DraftTerms] = lambda _draft, _round: DraftTerms()
    # without a model, whether by its settings it sees only a part of each text, in a cache of its own where a token's
    # slot is not its position. `reproducible=true` on a GPU refuses such drafts.
    sees_window: Callable[[Any], bool] = lambda _draft: False
    step_name: str = "draft"  # without a model, what it does in a round, in the table of a plan.
    # from its settings, those with which it drafts along a finished text that no round verifies: from this text alone,
    # and without a change of the target's cache. Tools that score drafts ask for them.
    alone: Callable[[Any], Any] = lambda draft: draft
    # without a model, arguments of transformers' `generate`, which then drafts K tokens as it does; None for none.
    of_library: Callable[[Any, int], dict[str, object]] | None = None

    def is_certain(self, *, is_greedy: bool = False, tree: TreeShape | None = None) -> bool:
        """Whether drafted tokens are a function of the text, without probabilities, as those of greedy draft models."""
        return is_greedy or not (self.has_model or self.draws) or bool(tree and tree.is_dynamic)

    @property
    def settings(self) -> type[Any]:
        """Its settings, with the settings that extensions add to them."""
        config: Any = self.config
        return whole(config)


DRAFTERS: Registry[DrafterRecord] = Registry(setting="draft.kind", kind=DrafterRecord)
register, drafters, problem_of = DRAFTERS.register, DRAFTERS.all, DRAFTERS.problem_of


def drafter_of(draft: DrafterConfig) -> DrafterRecord:
    """The record of a draft; an unknown kind raises ConfigError."""
    return DRAFTERS.of(draft.kind)


def of_kind(kind: str) -> DrafterConfig:
    """The settings of a kind of draft, all by default; an unknown kind raises ConfigError."""
    made: DrafterConfig = DRAFTERS.of(kind).settings(kind=kind)
    return made


def free_drafts() -> list[str]:
    """The kinds of draft that need neither a model nor the target's."""
    return [name for name, one in drafters().items() if one.make and not (one.has_model or one.reads_target)]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftVocabulary:
    """The tokens that a draft model drafts in: the target's, or its own if a setting of the draft asks for that.

    Attributes:
        name: the name of the setting's value.
        setting: a setting of `ModelDraftConfig` that an extension adds; empty for the target's tokens.
        value: the value of the setting that asks for these tokens.
        make: `module:class` of the drafter, called with `drafters.drafter.DrafterParts`.
        check: `module:function` that raises ConfigError unless the draft can draft for the target, from the
            `run.checkpoints.Source` of each.
        prepare: as `DrafterRecord.prepare`.
        slots_per_slot: slots of the draft's cache for each slot of the target's, up to the draft's context.
        first_positions: tokens of a row that the first step of a round reads.
        logits_bytes: bytes of a drafted token's logit beyond those with the target's tokens.
    """

    name: str
    setting: str = ""
    value: Enum | None = None
    make: str
    check: str
    prepare: str | None = None
    slots_per_slot: int = 1
    first_positions: int = 2
    logits_bytes: int = 0

    @property
    def asked(self) -> str:
        """The setting that asks for it, with its value."""
        return said(f"draft.{self.setting}", self.name)


SAME = DraftVocabulary(
    name="same",
    make="llama_ssp.speculate.drafters.model:ModelDrafter",
    check="llama_ssp.run.checkpoints:check_same_tokens",
)
VOCABULARIES: Registry[DraftVocabulary] = Registry(setting="tokenizer", modules=(__name__,), kind=DraftVocabulary)


def other_vocabularies() -> list[DraftVocabulary]:
    """The vocabularies that are not the target's."""
    return [one for one in VOCABULARIES.all().values() if one.setting]


def vocabulary_of(draft: DrafterConfig) -> DraftVocabulary:
    """The vocabulary that the settings of a draft ask for."""
    return next((one for one in other_vocabularies() if getattr(draft, one.setting, None) is one.value), SAME)


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftCache:
    """A cache in which a draft model keeps only a part of each text.

    Attributes:
        name: the name of the record.
        num_kept: returns the most tokens of a row that are kept, from the settings of a draft; None for all.
        make: `module:class` of the drafter, called with `drafters.drafter.DrafterParts`.
        of_head: `module:function` that gives a draft head such a cache, called with its runner and the same parts.
        taps: `module:class` of the taps of such a head, a `models.cache.Taps` that is also called with the settings of
            the draft, and the most tokens that a round drafts.
    """

    name: str
    num_kept: Callable[[Any], int | None]
    make: str
    of_head: str
    taps: str


CACHES: Registry[DraftCache] = Registry(setting="draft cache", kind=DraftCache)


def cache_of(draft: DrafterConfig) -> DraftCache | None:
    """The cache that the settings of a draft ask for; None where it keeps all of a text."""
    return next((one for one in CACHES.all().values() if one.num_kept(draft) is not None), None)


def sees_window(draft: DrafterConfig) -> bool:
    """Whether a draft sees only a part of a text, from a cache whose slot numbers are not positions."""
    return cache_of(draft) is not None or drafter_of(draft).sees_window(draft)


@dataclass(kw_only=True)
class ModelDraftConfig(DrafterConfig):
    """The draft model."""

    greedy: bool = setting(
        False, "true drafts the most probable tokens at every temperature; the rules take them as certain."
    )


def drafts_greedily(draft: DrafterConfig) -> bool:
    """Whether a draft model takes its most probable tokens at every temperature."""
    return isinstance(draft, ModelDraftConfig) and draft.greedy


def is_certain(draft: DrafterConfig, tree: TreeShape | None = None) -> bool:
    """See `DrafterRecord`; at every temperature."""
    return drafter_of(draft).is_certain(is_greedy=drafts_greedily(draft), tree=tree)


def reads_draft_probs(config: RunConfig) -> bool:
    """Whether a rule compares with the draft's probabilities, so that their bits can change what is drawn."""
    rule, samples = RULES.find(config.verification.rule), config.sampling.temperature > 0 or draws_by_row(config)
    return bool(drafts(config.draft) and rule and rule.needs_probs and samples)


register(DrafterRecord(name=schema.NO_DRAFT, make=None))
# Source: arXiv:2302.01318, arXiv:2211.17192.
_MAKE_MODEL = "llama_ssp.speculate.drafters.model:make"
register(
    DrafterRecord(name=schema.MODEL_DRAFT, make=_MAKE_MODEL, config=ModelDraftConfig, has_model=True, has_trees=True)
)

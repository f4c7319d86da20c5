"""Kinds of draft: their records and settings."""

from dataclasses import dataclass
from enum import Enum

from llama_ssp.catalogue import read_path
from llama_ssp.errors import ConfigError
from llama_ssp.fields import setting
from llama_ssp.registry import Registry
from llama_ssp.settings import schema
from llama_ssp.settings.schema import DrafterConfig

NGRAM_DRAFT = "ngram"
MOST_CORPUS_TOKENS = 2**20
"""Tokens of the longest corpus."""
MTP_DRAFTS = {"MTP", "nextn", "NEXTN"}
"""Names that other engines give the layers that predict further tokens."""


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


DRAFTERS: Registry[DrafterRecord] = Registry(setting="draft.kind")
register, drafters, problem_of = DRAFTERS.register, DRAFTERS.all, DRAFTERS.problem_of


def drafter_of(draft: DrafterConfig) -> DrafterRecord:
    """The record of a draft; an unknown kind raises ConfigError."""
    return DRAFTERS.of(draft.kind)


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


@dataclass(kw_only=True)
class NgramConfig(DrafterConfig):
    """Prompt look-up."""

    longest: int = setting(
        4, "the most of the last tokens that are compared; a longer match is preferred to a shorter one."
    )
    shortest: int = setting(1, "the fewest of them that make a match.")
    history: int = setting(
        64,
        "newest other texts of the run that longer matches are copied from, such as samples of one prompt; 0 for none.",
    )
    corpus: str | None = setting(
        None, "a run.jsonl, or a file of text, that still longer matches are copied from, the most frequent ones."
    )

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of the corpus that there is room for: one for two bytes of the file; the last ones are kept.

        Raises ConfigError if there is no such file.
        """
        if self.corpus is None:
            return 0
        file = read_path(self.corpus)
        if not file.is_file():
            raise ConfigError(f"draft.corpus={self.corpus} is no file: give a run.jsonl or a text")
        return min(file.stat().st_size // 2 + 1, MOST_CORPUS_TOKENS)


register(DrafterRecord(name=schema.NO_DRAFT, make=None))
# Source: arXiv:2302.01318, arXiv:2211.17192; with a tokenizer of its own: arXiv:2502.05202.
_MAKE_MODEL = "llama_ssp.speculate.drafters.model:make"
register(
    DrafterRecord(name=schema.MODEL_DRAFT, make=_MAKE_MODEL, config=ModelDraftConfig, has_model=True, has_trees=True)
)
# Copies what followed the last tokens where they stood before. Source: Saxena 2023, "Prompt Lookup Decoding".
_MAKE_NGRAM = "llama_ssp.speculate.drafters.ngram:NgramDrafter"
register(DrafterRecord(name=NGRAM_DRAFT, make=_MAKE_NGRAM, config=NgramConfig, has_trees=True))

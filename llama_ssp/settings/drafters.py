"""Kinds of draft: their records and settings, and what keeps a draft from drafting for a target."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from llama_ssp.settings import catalogue
from llama_ssp.settings.folders import is_hub_id
from llama_ssp.settings.registry import Registry
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    NO_DRAFT,
    DrafterConfig,
    DraftLayout,
    ModelConfig,
    PlacementConfig,
    SpeculationConfig,
)

NGRAM_DRAFT = "ngram"


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


DRAFTERS: Registry[DrafterRecord] = Registry(setting="draft.kind")
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


class DraftTokenizer(Enum):
    """Whether the draft model must have the target's tokenizer, or has its own."""

    same = "same"
    own = "own"


class Matching(Enum):
    """How the tokens of a draft with its own tokenizer become tokens of the target; `ModelDraftConfig` says more.

    Source: arXiv:2502.05202, token-level intersection, and string-level exact match.
    """

    intersection = "intersection"
    text = "text"


@dataclass(kw_only=True)
class ModelDraftConfig(DrafterConfig):
    """The draft model and its tokenizer."""

    # own allows a draft whose tokenizer is not the target's, which same refuses.
    tokenizer: DraftTokenizer = DraftTokenizer.same
    # with tokenizer=own, intersection drafts among the tokens that both vocabularies have; text encodes the draft's
    # text with the target's tokenizer, on the host.
    matching: Matching = Matching.intersection


def problems_of_pair(target: ModelConfig, draft: DrafterConfig, *, is_synthetic: bool = False) -> Iterator[str]:
    """Yield what keeps a resolved draft from drafting for a target; unknown sizes pass.

    Synthetic weights give both models one tokenizer. Folders, and models of the hub that the catalogue lacks, are
    compared when their tokenizers are read.
    """
    model = draft.model
    if model is None or not (target.shape and model.shape):
        return
    if matching_of(draft):
        shapes = [(shape.model_type, shape.vocab_size) for shape in (target.shape, model.shape)]
        is_listed = not any(each.path or is_hub_id(each.name) for each in (target, model))
        if is_listed and shapes[0] == shapes[1] and not is_synthetic:
            yield (
                f"draft.tokenizer=own has no effect with draft={model.name}, which has the target's tokenizer: "
                "leave it out"
            )
    elif not catalogue.may_share_vocabulary(target.shape, model.shape):
        names = ", ".join(catalogue.smaller_relatives(target)) or "none in the catalogue"
        otherwise = "" if is_synthetic else "; draft.tokenizer=own allows any"
        yield (
            f"the draft must have the target's vocabulary: model={target.name} has {target.shape.vocab_size} tokens, "
            f"draft={model.name} {model.shape.vocab_size}; drafts that fit: {names}{otherwise}"
        )


def matching_of(draft: DrafterConfig) -> Matching | None:
    """How the tokens of a draft with its own tokenizer are matched; None for every other draft."""
    if not isinstance(draft, ModelDraftConfig) or draft.tokenizer is DraftTokenizer.same:
        return None
    return draft.matching


def problems_of_overlap(
    speculation: SpeculationConfig, draft: DrafterConfig, placement: PlacementConfig
) -> Iterator[str]:
    """Yield what keeps drafting from overlapping verification."""
    if not speculation.overlap or draft.kind == NO_DRAFT:
        return
    if draft.model is None:
        yield f"speculation.overlap=true needs a draft model, and draft={draft.kind} has none: give one with draft=NAME"
        return
    if placement.auto or placement.draft.kind is not DraftLayout.own_gpu:
        chosen = "placement=auto" if placement.auto else f"placement.draft.kind={placement.draft.kind.name}"
        yield (
            f"speculation.overlap=true needs a draft on ranks of its own, and {chosen} was given: "
            "use placement=own_gpu on at least 2 ranks"
        )
    if speculation.adapts:
        yield (
            "speculation.overlap=true needs one K for all rounds, and speculation.num_draft_tokens=auto was "
            "given: use a number, about as many as draft steps fit into a forward of the target"
        )
    if draft.fallback is not None:
        yield f"speculation.overlap=true drafts with the model alone: leave draft.fallback={draft.fallback} out"
    if matching_of(draft):
        yield "speculation.overlap=true needs a draft with the target's tokenizer: leave draft.tokenizer=own out"


@dataclass(kw_only=True)
class NgramConfig(DrafterConfig):
    """Prompt look-up."""

    longest: int = 4  # the most of the last tokens that are compared; a longer match is preferred to a shorter one.
    shortest: int = 1  # the fewest of them that make a match.


register(DrafterRecord(name=NO_DRAFT, make=None))
# Source: arXiv:2302.01318, arXiv:2211.17192; with a tokenizer of its own: arXiv:2502.05202.
register(
    DrafterRecord(
        name=MODEL_DRAFT, make="llama_ssp.speculate.drafters.model:make", config=ModelDraftConfig, has_model=True
    )
)
# Copies what followed the last tokens where they stood before. Source: Saxena 2023, "Prompt Lookup Decoding".
register(DrafterRecord(name=NGRAM_DRAFT, make="llama_ssp.speculate.drafters.ngram:make", config=NgramConfig))

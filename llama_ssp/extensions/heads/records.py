"""The records of draft heads: EAGLE-3, P-EAGLE, DFlash, DSpark, and the MTP layers of a target. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llama_ssp import catalogue
from llama_ssp.architectures.model_files import num_layers_ahead
from llama_ssp.catalogue import ModelConfig
from llama_ssp.extensions.heads.layouts import BLOCK_HEAD, HEAD, PARALLEL_HEAD, is_padded_alike, read_head_config
from llama_ssp.extensions.heads.mtp import MTP_KINDS, check_mtp, no_mtp
from llama_ssp.settings.combinations import Ability, num_steps
from llama_ssp.settings.draft_heads import DraftHead
from llama_ssp.settings.drafters import ModelDraftConfig
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import NoEffect, task_of
from llama_ssp.text.messages import said

FAMILIES = HEAD, PARALLEL_HEAD, BLOCK_HEAD
_MTP = "mtp"
OF_FILES = DraftHead(
    name="head", read_config=read_head_config, synthesize="llama_ssp.extensions.heads.synthetic:head_of"
)
OF_TARGET = DraftHead(
    name=_MTP,
    in_target="MTP layers",
    source="llama_ssp.extensions.heads.sources:source_of",
    other_names=frozenset({"MTP", "nextn", "NEXTN"}),
    families=MTP_KINDS,
    lacks=no_mtp,
    is_in=lambda field: num_layers_ahead(field) > 0,
    check=check_mtp,
    describe="llama_ssp.extensions.heads.sources:describe_mtp",
)


@dataclass(kw_only=True)
class ConfidenceConfig(ModelDraftConfig):
    """The draft model, and the confidence at which its drafts end."""

    confidence: float = setting(
        0.0,
        "a DSpark head ends a draft before the first token that it expects to be accepted with less than this "
        "probability; 0 drafts K tokens.",
    )

    @property
    def ends_early(self) -> bool:
        """See `DrafterConfig`."""
        return self.confidence > 0


SETTINGS = MoreSettings(
    name="confidence",
    config=ConfidenceConfig,
    ranges=(("draft.confidence", lambda p: 0 <= p < 1, "at least 0 and below 1"),),
)


def least_confidence(draft: object) -> float:
    """The setting of a draft; 0 if it has none."""
    return draft.confidence if isinstance(draft, ConfidenceConfig) else 0.0


def _is_mtp(draft: ModelConfig | None) -> bool:
    return draft is not None and draft.name == _MTP


def _is_head(config: RunConfig) -> bool:
    draft = config.draft.model
    return draft is not None and (_is_mtp(draft) or bool(draft.shape and draft.shape.is_head))


def _block(config: RunConfig) -> int:
    shape = config.draft.model and config.draft.model.shape
    return shape.most_drafted if shape else 0


def _words_of_blocks(config: RunConfig) -> Mapping[str, object]:
    block = _block(config)
    return {"block": block, "steps": num_steps(config), "whole_block": said("speculation.num_draft_tokens", block)}


def _problems(config: RunConfig) -> Iterator[str]:
    """Yield why a draft head cannot be used in the setting that names it."""
    target, draft = config.model, config.draft.model
    if target.shape and target.shape.is_head:
        yield f"{said('model', target.name)} is a draft head: give its target as the model, and draft={target.name}"
    if draft and _is_mtp(draft) and target.shape and target.shape.model_type not in MTP_KINDS:
        yield no_mtp(said("model", target.name))
    if draft is None or not (_is_mtp(draft) or (draft.shape and draft.shape.is_head)):
        return
    own = draft.shape and (draft.shape.target_hidden_size, draft.shape.num_token_ids)
    if (
        own
        and target.shape
        and not (target.shape.hidden_size == own[0] and is_padded_alike(target.shape.vocab_size, own[1]))
    ):
        yield (
            f"draft={draft.name} is the head of a target of width {own[0]} with {own[1]} tokens, and "
            f"{said('model', target.name)} has width {target.shape.hidden_size} and {target.shape.vocab_size} tokens: "
            "choose a head of this target"
        )
    elif draft.target and target.shape and (own_shape := catalogue.load(draft.target).shape):
        num_layers, own_layers = target.shape.num_hidden_layers, own_shape.num_hidden_layers
        if num_layers != own_layers and config.reads_files:
            yield (
                f"draft={draft.name} is the head of {draft.target}, which has {own_layers} layers, and "
                f"{said('model', target.name)} has {num_layers}: choose a head of this target"
            )


_OF_HEADS = {
    "overlap": "draft={draft} is a draft head, which drafts from what the target has verified: leave {overlap} out",
    "an own tokenizer": "draft={draft} is a draft head, which reads the target's tokens: leave {own} out",
}
_OF_BLOCKS = {
    "more than a block": (
        "the draft head drafts blocks of {block} tokens, and {steps} are asked for: use {whole_block} or fewer, or a "
        "tree that is no deeper"
    ),
}
_OF_MTP = {
    "an adapter of the target": "draft=mtp reads the files of the target without {adapter}: leave one out",
}
A_HEAD = Ability(name="a head", has=_is_head, clashes=_OF_HEADS, problems=_problems)
A_BLOCK = Ability(name="a block", has=lambda config: _block(config) > 0, clashes=_OF_BLOCKS, words=_words_of_blocks)
MORE_THAN_A_BLOCK = Ability(name="more than a block", has=lambda config: num_steps(config) > _block(config))
MTP = Ability(name="MTP layers", has=lambda config: _is_mtp(config.draft.model), clashes=_OF_MTP)


def _has_no_estimate(config: RunConfig) -> bool:
    draft = config.draft.model
    return draft is not None and (_is_mtp(draft) or bool(draft.shape and not draft.shape.has_confidence))


def _effect_of_confidence(config: RunConfig) -> Iterator[NoEffect]:
    if least_confidence(config.draft) and config.draft.model is None and not task_of(config).needs_draft:
        yield NoEffect("draft.confidence", "without a draft model: give a DSpark head with draft=NAME")


_OF_CONFIDENCE = {
    "a draft without a confidence head": "{confidence} is of DSpark heads with a confidence head, and draft={draft} "
    "has none: leave it out",
    "a tree": "{confidence} ends chains: leave it or {tree_key} out",
    "forced lengths": "{confidence} ends drafts, and {forced} says how many of their tokens count: leave one out",
}
CONFIDENCE = Ability(
    name="a draft that ends early",
    has=lambda config: least_confidence(config.draft) > 0,
    clashes=_OF_CONFIDENCE,
    words=lambda config: {"confidence": said("draft.confidence", least_confidence(config.draft))},
    problems=_effect_of_confidence,
)
WITHOUT_CONFIDENCE = Ability(name="a draft without a confidence head", has=_has_no_estimate)

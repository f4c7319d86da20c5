"""The records of drafts with another tokenizer: their setting, what they exclude, what a plan counts. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from llama_ssp.catalogue import is_hub_id
from llama_ssp.settings.combinations import Ability
from llama_ssp.settings.drafters import DraftVocabulary, ModelDraftConfig, vocabulary_of
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import NoEffect, task_of

MOST_PIECES = 4  # The most tokens of the draft that spell one token of the target.
OWN_SLOTS_PER_SLOT = 2
"""Cache slots of the draft per slot of the target; also the most tokens of its text per token of the target."""


class DraftTokenizer(Enum):
    """Whether the draft model must have the target's tokenizer, or has its own."""

    same = "same"
    own = "own"


@dataclass(kw_only=True)
class TokenizerConfig(ModelDraftConfig):
    """The draft model and its tokenizer."""

    tokenizer: DraftTokenizer = setting(
        DraftTokenizer.same,
        "own allows a draft whose tokenizer is not the target's, which same refuses: it drafts among the tokens that "
        "both vocabularies have.",
    )


SETTINGS = MoreSettings(name="tokenizer", config=TokenizerConfig, after="fallback")
# Source: arXiv:2502.05202. Its logits have one more column, and are moved to the target's ids.
OWN = DraftVocabulary(
    name="own",
    setting="tokenizer",
    value=DraftTokenizer.own,
    make="llama_ssp.extensions.tokenizers.drafter:IntersectionDrafter",
    check="llama_ssp.extensions.tokenizers.alignment:check",
    prepare="llama_ssp.extensions.tokenizers.alignment:pair_of",
    slots_per_slot=OWN_SLOTS_PER_SLOT,
    first_positions=MOST_PIECES + 1,
    logits_bytes=8,
)


def no_effect(draft: str) -> str:
    """The sentence for a draft with the target's tokenizer."""
    return f"{OWN.asked} has no effect with draft={draft}, which has the target's tokenizer: leave it out"


def _is_own(config: RunConfig) -> bool:
    return vocabulary_of(config.draft) is OWN


def _problems(config: RunConfig) -> Iterator[str | NoEffect]:
    key, target, model = f"draft.{OWN.setting}", config.model, config.draft.model
    if model is None and not task_of(config).needs_draft:
        yield NoEffect(key, "without a draft model: give one with draft=NAME")
    if model and not config.reads_files:
        yield NoEffect(key, f"with weights={config.weights}, which gives both models one tokenizer")
    elif model and _is_own(config) and target.shape and model.shape and not model.shape.is_head:
        shapes = [(shape.model_type, shape.vocab_size) for shape in (target.shape, model.shape)]
        is_listed = not any(entry.path or is_hub_id(entry.name) for entry in (target, model))
        if is_listed and shapes[0] == shapes[1]:
            yield no_effect(model.name)


_CLASHES = {
    "a tree": "{tree} needs a draft with the target's tokenizer: leave {own} out",
    "overlap": "{overlap} needs a draft with the target's tokenizer: leave {own} out",
    "a recurrent draft": (
        "{own} respells a text from several tokens back, and a layer of kind {layer}, as this {family} draft has, "
        "keeps no state there: give a draft without such layers, or with the target's tokenizer"
    ),
}
ABILITY = Ability(
    name="an own tokenizer", has=_is_own, clashes=_CLASHES, words=lambda _config: {"own": OWN.asked}, problems=_problems
)

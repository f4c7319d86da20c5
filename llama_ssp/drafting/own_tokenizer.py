"""Makes the drafter of a model with its own tokenizer, by the way in which its tokens become the target's."""

from llama_ssp.drafting.intersection import IntersectionDrafter
from llama_ssp.drafting.own_text import VocabularyMap
from llama_ssp.drafting.protocol import Drafter, DrafterParts
from llama_ssp.drafting.vocabularies import TokenizerPair
from llama_ssp.models.runner import Runner


def make_with_own_tokenizer(parts: DrafterParts, runner: Runner, tokenizers: TokenizerPair) -> Drafter:
    """Make the drafter of a rank that holds the draft model or a slice of it."""
    size = runner.vocab_size
    alignment = tokenizers.align(target_size=parts.vocab_size, draft_size=size)
    return IntersectionDrafter(
        runner,
        rule=parts.rule,
        num_draft_tokens=parts.num_draft_tokens,
        vocabularies=VocabularyMap.of(alignment, draft_size=size, device=runner.device),
        translator=tokenizers.into_draft(size=size),
        comm=parts.comm,
        src=parts.src,
    )

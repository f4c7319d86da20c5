"""Makes the drafter of a model with its own tokenizer, by the way in which its tokens become the target's."""

from llama_ssp.config.drafters import Matching, matching_of
from llama_ssp.drafting.intersection import IntersectionDrafter
from llama_ssp.drafting.own_text import VocabularyMap
from llama_ssp.drafting.protocol import Drafter, DrafterParts
from llama_ssp.drafting.retokenized import RetokenizedDrafter
from llama_ssp.drafting.translation import TokenizerPair
from llama_ssp.models.runner import Runner


def make_with_own_tokenizer(parts: DrafterParts, runner: Runner, tokenizers: TokenizerPair) -> Drafter:
    """Make the drafter of a rank that holds the draft model or a slice of it."""
    num_draft_tokens, comm = parts.num_draft_tokens, parts.comm
    if matching_of(parts.config) is Matching.text:
        return RetokenizedDrafter(runner, num_draft_tokens=num_draft_tokens, tokenizers=tokenizers, comm=comm)
    size = runner.vocab_size
    alignment = tokenizers.align(target_size=parts.vocab_size, draft_size=size)
    return IntersectionDrafter(
        runner,
        rule=parts.rule,
        num_draft_tokens=num_draft_tokens,
        vocabularies=VocabularyMap.of(alignment, draft_size=size, device=runner.device),
        translator=tokenizers.into_draft(size=size),
        comm=comm,
    )

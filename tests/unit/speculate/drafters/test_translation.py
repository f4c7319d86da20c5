"""A prompt is written in the draft's tokens."""

from llama_ssp.speculate.drafters.tokenizers import TokenizerPair
from tests.helpers.tokenizers import byte_level, sentencepiece_like


def test_prompts_are_written_in_the_drafts_tokens() -> None:
    target, draft = sentencepiece_like(), byte_level()
    pair, size = TokenizerPair(target, draft), len(draft)
    ids = target("Hello world\n").input_ids
    assert ids[0] == target.bos_token_id
    assert draft.decode(pair.into_draft(ids, size=size)) == "Hello world\n"
    assert pair.into_draft([target.bos_token_id], size=size) == [draft.bos_token_id], "an empty prompt"

"""Tokens that are shared mean the same text, and pieces spell what they stand for, across kinds of tokenizers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llama_ssp.extensions.tokenizers.alignment import Alignment, TokenizerPair, align, meanings_of, neutral_id
from llama_ssp.extensions.tokenizers.records import MOST_PIECES
from tests.helpers.tokenizers import byte_level, save_tokenizer, sentencepiece_like

TEXTS = ["def return (n):", "Hello world", "the other\n  world", "é 日本 \t", "return return"]


def aligned(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Alignment:
    return align(target, draft, target_size=len(target), draft_size=len(draft))


@pytest.mark.parametrize("kinds", [(byte_level, sentencepiece_like), (sentencepiece_like, byte_level)])
def test_a_text_is_the_same_in_the_pieces_of_its_tokens(
    kinds: tuple[Callable[[], PreTrainedTokenizerFast], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_ssp.extensions.tokenizers.alignment.MOST_PIECES", 20)  # nothing is cut
    target, draft = (kind() for kind in kinds)
    found = aligned(target, draft)
    for text in TEXTS:
        ids = target(text, add_special_tokens=False).input_ids
        assert target.decode(ids) == text
        spelled = [piece for token in ids for piece in found.pieces[token]]
        assert str(draft.decode(spelled, clean_up_tokenization_spaces=False)).lstrip(" ") == text.lstrip(" ")


def test_equal_tokens_are_found_however_they_are_written() -> None:
    target, draft = byte_level(), sentencepiece_like()
    found, ids = aligned(target, draft), draft.get_vocab()
    vocabulary = target.get_vocab()
    assert found.shared[vocabulary["Ġworld"]] == ids["▁world"]
    assert found.shared[vocabulary["Ġ"]] == ids["▁"], "of a letter and its byte, the letter"
    assert found.shared[vocabulary["n"]] == ids["n"]
    assert found.shared[vocabulary["Ċ"]] == ids["\n"]
    assert found.shared[vocabulary["é"]] == ids["<0xE9>"], "a byte is written as the letter of its number"
    assert found.shared[vocabulary["</s>"]] == ids["</s>"]
    assert found.shared[vocabulary["Ġother"]] is None
    numbers = [token for token in found.shared if token is not None]
    assert len(numbers) == len(set(numbers))


def test_every_token_is_spelled_by_a_few_tokens_of_the_draft() -> None:
    target, draft = byte_level(), sentencepiece_like()
    found = align(target, draft, target_size=len(target) + 7, draft_size=len(draft) - 2)
    assert len(found.pieces) == len(found.shared) == len(target) + 7
    assert all(1 <= len(pieces) <= MOST_PIECES for pieces in found.pieces)
    assert max(piece for pieces in found.pieces for piece in pieces) < len(draft) - 2
    assert found.pieces[-1] == (neutral_id(draft, size=len(draft)),), "padding of the head, which no token has"
    assert found.shared[-1] is None


def test_a_tokenizer_compared_with_itself_shares_all_that_can_be_told_apart() -> None:
    tokenizer = byte_level()
    assert aligned(tokenizer, tokenizer).shared == tuple(range(len(tokenizer)))


def test_ends_of_sequence_are_shared_by_their_role_and_other_special_tokens_by_name() -> None:
    target, draft = byte_level(), byte_level()
    target.add_special_tokens({"eos_token": "<stop>", "additional_special_tokens": ["<only here>"]})
    found, ids = aligned(target, draft), target.get_vocab()
    assert found.shared[ids["<stop>"]] == draft.eos_token_id
    assert found.shared[ids["<s>"]] == draft.bos_token_id
    assert found.shared[ids["<only here>"]] is None
    assert found.pieces[ids["<only here>"]] == (draft.bos_token_id,)


def test_words_without_a_decoder_have_a_space_between_them(tmp_path: Path) -> None:
    for name, size in (("target", 20), ("draft", 12)):
        (tmp_path / name).mkdir()
        save_tokenizer(tmp_path / name, size)
    target, draft = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("target", "draft"))
    assert meanings_of(target)[5] == b" t5"
    assert aligned(target, draft).shared == (*range(12), *[None] * 8)


def test_added_tokens_are_texts_whatever_the_alphabet() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_tokens(["  ", "Ġ é"])
    assert meanings_of(fast) == {0: b"a", 1: b" ", 2: b"  ", 3: "Ġ é".encode()}


def test_prompts_are_written_in_the_drafts_tokens() -> None:
    target, draft = sentencepiece_like(), byte_level()
    pair, size = TokenizerPair(target, draft), len(draft)
    ids = target("Hello world\n").input_ids
    assert ids[0] == target.bos_token_id
    assert draft.decode(pair.into_draft(ids, size=size)) == "Hello world\n"
    assert pair.into_draft([target.bos_token_id], size=size) == [draft.bos_token_id], "an empty prompt"

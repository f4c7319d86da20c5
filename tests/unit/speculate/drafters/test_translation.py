"""What a draft adds to a text is written in the target's tokens, with its spaces and characters right."""

from collections.abc import Callable
from functools import partial

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from llama_ssp.speculate.drafters.tokenizers import TokenizerPair
from tests.helpers.tokenizers import byte_level, sentencepiece_like

Kind = Callable[[], PreTrainedTokenizerFast]


def llama_like() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text that it encodes."""
    tokenizer = sentencepiece_like()
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(spaces)
    return tokenizer


KINDS: list[tuple[Kind, Kind]] = [
    (byte_level, sentencepiece_like), (sentencepiece_like, byte_level),
    (llama_like, byte_level), (byte_level, llama_like),
]  # fmt: skip


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Hello", " world"),
        ("return", " n"),
        ("def", "\n  re"),
        ("re", "turn"),
        ("Hello world", "turn Hello"),
        ("a", "日"),
    ],
)
def test_the_targets_text_goes_on_as_the_drafts(before: str, after: str, kinds: tuple[Kind, Kind]) -> None:
    target, draft = (kind() for kind in kinds)
    ids, own_ids = ids_of(target, before), ids_of(draft, before)
    whole = ids_of(draft, before + after)
    new_own_ids = whole[len(own_ids) :] if whole[: len(own_ids)] == own_ids else ids_of(draft, after)
    new_ids = TokenizerPair(target, draft).into_target(ids, own_ids, new_own_ids)
    written = str(draft.decode([*own_ids, *new_own_ids], clean_up_tokenization_spaces=False))
    assert str(target.decode([*ids, *new_ids], clean_up_tokenization_spaces=False)) == written
    assert written.startswith(before)
    assert len(written) > len(before)


def test_a_token_that_would_have_been_another_is_followed_by_the_rest_of_the_text() -> None:
    """The target has written " the" in two tokens; "t" and "he" would be one, but "t" is text already."""
    target, draft = byte_level(), sentencepiece_like()
    vocabulary = target.get_vocab()
    assert "Ġthe" in vocabulary
    ids = [*ids_of(target, "def"), vocabulary["Ġ"], vocabulary["t"]]
    own_ids = ids_of(draft, "def t")
    new_ids = TokenizerPair(target, draft).into_target(ids, own_ids, ids_of(draft, "def the")[len(own_ids) :])
    assert target.decode([*ids, *new_ids]) == "def the"


def test_half_a_character_is_not_proposed() -> None:
    target, draft = byte_level(), sentencepiece_like()
    own_ids, rest = ids_of(draft, "n"), ids_of(draft, "n日")
    pair = TokenizerPair(target, draft)
    assert pair.into_target(ids_of(target, "n"), own_ids, rest[len(own_ids) : -1]) == []
    assert pair.into_target(ids_of(target, "n"), own_ids, rest[len(own_ids) :]) == ids_of(target, "日")


def test_an_end_of_sequence_is_the_targets_and_nothing_follows_it() -> None:
    target, draft = byte_level(), sentencepiece_like()
    ids, own_ids = ids_of(target, "Hello"), ids_of(draft, "Hello")
    new = [*ids_of(draft, "Hello\n")[len(own_ids) :], draft.eos_token_id, *ids_of(draft, "n")]
    found = TokenizerPair(target, draft).into_target(ids, own_ids, new)
    assert found == [*ids_of(target, "\n"), target.eos_token_id]


def test_prompts_are_written_in_the_drafts_tokens() -> None:
    target, draft = sentencepiece_like(), byte_level()
    pair, size = TokenizerPair(target, draft), len(draft)
    ids = target("Hello world\n").input_ids
    assert ids[0] == target.bos_token_id
    assert draft.decode(pair.into_draft(ids, size=size)) == "Hello world\n"
    assert pair.into_draft([target.bos_token_id], size=size) == [draft.bos_token_id], "an empty prompt"


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("text", ["def return (n):\n  return the other world", "Hello world Hello n = the n"])
def test_the_end_of_a_text_is_translated_on_its_own(text: str, kinds: tuple[Kind, Kind]) -> None:
    target, draft = (kind() for kind in kinds)
    ids = ids_of(target, text)
    into_draft = partial(TokenizerPair(target, draft).into_draft, size=len(draft))
    whole = str(draft.decode(into_draft(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    for start in range(1, len(ids)):
        parts = [*into_draft(ids[:start]), *into_draft(ids, start=start)]
        assert str(draft.decode(parts, skip_special_tokens=True, clean_up_tokenization_spaces=False)) == whole

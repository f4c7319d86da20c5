"""Streamed pieces are whole characters, know their origin, and add up to the text."""

import pytest
from transformers import PreTrainedTokenizerFast, TextStreamer

from llama_ssp.speculate.engine.text import IncrementalText, Piece, StreamerAdapter
from tests.helpers.tokenizers import byte_level, sentencepiece_like

TEXT = "def tête(n):\n\treturn '🙂🙂' + \"你好, wörld\"  # 👩‍👩‍👧 naïve\n"


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    found = tokenizer.convert_tokens_to_ids(list(tokens))
    assert isinstance(found, list)
    assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in found
    return found


def bytes_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_no_piece_holds_half_a_character_which_counts_to_the_token_that_completes_it() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂b")
    alone, grouped = (IncrementalText(tokenizer, []) for _ in range(2))
    assert [joined(alone.push([token_id])) for token_id in ids] == ["a", "", "", "", "🙂", "b"]
    assert grouped.push(ids[:3], num_accepted=3) == [Piece("a", True)]
    assert grouped.push(ids[3:], num_accepted=1) == [Piece("🙂b", False)]


def test_accepted_tokens_and_the_targets_own_are_told_apart() -> None:
    tokenizer = byte_level()
    ids = [token_id for letter in "wxyz" for token_id in tokenizer.encode(letter)]
    stream = IncrementalText(tokenizer, [])
    assert stream.push(ids[:1]) == [Piece("w", False)]
    assert stream.push(ids[1:], num_accepted=2) == [Piece("xy", True), Piece("z", False)]


def test_a_text_that_ends_inside_a_character_is_flushed() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂")[:-1]
    stream = IncrementalText(tokenizer, [])
    pieces = stream.push(ids, num_accepted=2) + stream.flush()
    assert joined(pieces) == tokenizer.decode(ids) == "a\ufffd"


def test_a_prompt_of_many_bytes_does_not_spoil_the_text_behind_it() -> None:
    """The context of 8 tokens begins inside a character of the prompt, which makes its whole run of bytes invalid."""
    tokenizer = sentencepiece_like()
    prompt_ids = ids_of(tokenizer, "<s>", "▁Hello") + bytes_of(tokenizer, "你好你好")
    stream = IncrementalText(tokenizer, prompt_ids)
    assert joined(stream.push(bytes_of(tokenizer, "好🙂") + ids_of(tokenizer, "▁world"))) == "好🙂 world"


def test_garbage_is_shown_after_a_while_and_good_text_follows() -> None:
    tokenizer = byte_level()
    (half,) = tokenizer.encode("🙂")[:1]
    stream = IncrementalText(tokenizer, [])
    assert "\ufffd" in joined(stream.push([half] * 20))
    assert joined(stream.push(tokenizer.encode("good🙂"))).endswith("good🙂")


def test_a_transformers_streamer_prints_the_completion(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_level()
    adapter = StreamerAdapter(TextStreamer(tokenizer, skip_prompt=True), tokenizer.encode("prompt"))
    ids = tokenizer.encode(TEXT)
    for at in range(0, len(ids), 3):
        adapter.put(ids[at : at + 3])
    adapter.end()
    assert capsys.readouterr().out == TEXT + "\n"

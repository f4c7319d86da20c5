"""New ids become the text that continues their prompt, in every layout of tokenizers."""

import random

import pytest

from llama_ssp.speculate.engine.text import IncrementalText, StopStrings
from llama_ssp.text.detokenize import INCOMPLETE, NUM_CONTEXT, TextAfter, decode_after
from tests.helpers.lanes import grid
from tests.helpers.tokenizers import LAYOUTS, layout

TEXT = "if x is not None:  return 'tête 🙂你好'\n\n the world"
ASCII = "if x is not None:  return 'the'\n\n the world"


def encoded(name: str, text: str) -> list[int]:
    """The ids of a text, without the token that begins it."""
    return list(layout(name)(text, add_special_tokens=False).input_ids)


def decoded(name: str, ids: list[int]) -> str:
    return str(layout(name).decode(ids, skip_special_tokens=True))


@grid(name=list(LAYOUTS), num_begins=[0, 1, 20])
def test_prompt_and_text_are_one_text_wherever_it_is_divided(name: str, num_begins: int) -> None:
    """Also within a character, which then belongs to the new text, and behind tokens without text."""
    ids = [layout(name).bos_token_id] * num_begins + encoded(name, ASCII if name == "metaspace" else TEXT)
    for place in range(len(ids) + 1):
        prompt = decoded(name, ids[:place]).rstrip(INCOMPLETE)
        assert prompt + decode_after(layout(name), ids[:place], ids[place:]) == decoded(name, ids), place


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prompt_that_ends_in_special_tokens_is_still_the_beginning(name: str) -> None:
    special = [layout(name).eos_token_id, layout(name).bos_token_id] * NUM_CONTEXT
    ids, num_words = encoded(name, "if x is not"), len(encoded(name, "if x is"))
    prompt_ids = [*ids[:num_words], *special]
    assert decode_after(layout(name), prompt_ids, [*ids[num_words:], *special]) == " not"
    stream = IncrementalText(layout(name), prompt_ids)
    assert "".join(piece.text for piece in stream.push([*ids[num_words:], *special]) + stream.flush()) == " not"


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_empty_prompt_begins_the_text(name: str) -> None:
    ids = encoded(name, "if x")
    for begin in ([], [layout(name).bos_token_id]):
        assert decode_after(layout(name), begin, ids) == "if x"
        assert decode_after(layout(name), begin, []) == ""


@grid(name=list(LAYOUTS), seed=list(range(5)))
def test_pieces_that_are_shown_add_up_to_the_recorded_text(name: str, seed: int) -> None:
    choice = random.Random(seed)
    parts = [encoded(name, word) for word in ("not", " None", " ", "\n", "it")] + [[layout(name).eos_token_id] * 10]
    if name != "metaspace":
        parts += [encoded(name, letter) for letter in ("é", "你", "🙂")]
    ids = [token for _ in range(60) for token in choice.choice(parts)]
    place = choice.randrange(len(ids))
    stream = IncrementalText(layout(name), ids[:place])
    pieces = stream.push(ids[place:]) + stream.flush()
    text = decode_after(layout(name), ids[:place], ids[place:])
    assert "".join(piece.text for piece in pieces) == text
    assert decoded(name, ids[:place]).rstrip(INCOMPLETE) + text == decoded(name, ids)


@pytest.mark.parametrize("name", ["llama", "llama_files", "gemma", "bytes"])
def test_a_character_that_the_prompt_has_begun_is_shown_once_it_is_complete(name: str) -> None:
    ids = encoded(name, "is 🙂你")
    for place in range(len(ids) - 6, len(ids)):
        stream = IncrementalText(layout(name), ids[:place])
        shown = "".join(piece.text for token in ids[place:] for piece in stream.push([token]))
        assert decoded(name, ids[:place]).rstrip(INCOMPLETE) + shown == "is 🙂你"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_stop_string_with_a_space_ends_the_texts_that_have_it_alone(name: str) -> None:
    prompt_ids, stops = encoded(name, "if x is"), StopStrings(layout(name), [" not"])
    for wanted, is_stop in ((" not None", True), ("not None", False), (":", False)):
        new_ids = encoded(name, f"if x is{wanted}")[len(prompt_ids) :]
        assert decode_after(layout(name), prompt_ids, new_ids) == wanted
        number = stops.watch(prompt_ids).num_until_stop(new_ids)
        assert (number is not None) == is_stop
        if is_stop:
            assert decode_after(layout(name), prompt_ids, new_ids[:number]) == " not"


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_names_of_special_tokens_are_text_where_they_are_wanted(name: str) -> None:
    after = TextAfter(layout(name), encoded(name, "if x is"), names_special=True)
    assert layout(name).eos_token in after.decode([layout(name).eos_token_id])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_work_does_not_grow_with_the_text_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lengths = layout(name), list[int]()
    decode = tokenizer.decode

    def watched(token_ids: list[int], **options: bool) -> str:
        lengths.append(len(token_ids))
        return str(decode(token_ids, **options))

    monkeypatch.setattr(tokenizer, "decode", watched)
    ids = encoded(name, ASCII * 100)
    decode_after(tokenizer, ids, ids)
    assert sum(lengths) <= len(ids) + 6 * NUM_CONTEXT
    lengths.clear()
    stream = IncrementalText(tokenizer, ids)
    stream.push(ids)
    assert max(lengths) <= 20

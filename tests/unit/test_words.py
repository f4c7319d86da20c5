"""Numbers in sentences and tables; control characters written out one by one, and nothing else changed."""

import pytest

from llama_ssp.words import counted, rounded, visible

SHOWN = {
    (0.5543,): "0.554", (9.4,): "9.40", (9.996,): "10.0", (99.96,): "100", (999.6,): "1000", (10324.0,): "10324",
    (0,): "0.00", (99.6,): "99.6", (999.96, 4): "1000", (99.996, 4): "100.0", (1.5, 4): "1.500",
}  # fmt: skip


@pytest.mark.parametrize(("given", "shown"), SHOWN.items())
def test_a_number_keeps_its_digits_and_has_no_exponent(given: tuple[float, int], shown: str) -> None:
    assert rounded(*given) == shown


def test_one_thing_is_in_words_and_others_in_digits() -> None:
    assert (counted(1, "node"), counted(0, "GPU"), counted(8, "GPU")) == ("one node", "0 GPUs", "8 GPUs")


SEQUENCES = {
    "\x1b[2J\x1b[1;1H": "\\x1b[2J\\x1b[1;1H",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "\x1b]8;;http://x\x1b\\y": "\\x1b]8;;http://x\\x1b\\y",
    "\x9b31m\x9d0;t\x9c\x90\x84": "\\x9b31m\\x9d0;t\\x9c\\x90\\x84",
    "a\bb\rc\x7f\x00\x0b\x0c": "a\\x08b\\rc\\x7f\\x00\\x0b\\x0c",
    "\u202egpj.exe\u2066": "\\u202egpj.exe\\u2066",
    "\udc9b": "\\udc9b",
}


@pytest.mark.parametrize(("text", "shown"), SEQUENCES.items())
def test_a_sequence_is_visible_whole_or_split_over_any_tokens(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert "".join(map(visible, text)) == shown
    assert visible(shown) == shown


def test_text_newlines_and_tabs_stay() -> None:
    text = "def f():\n\treturn 'é', '你好', '🙂', '\u200f\u05d0', '\\x1b'\n"
    assert visible(text) == text

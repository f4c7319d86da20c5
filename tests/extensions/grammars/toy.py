"""Four tokens, languages that they spell, and masks found by writing out every text: nothing of llguidance."""

from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llama_ssp.speculate.engine.masks import Vocabulary

TOKENS = (b"a", b"b", b"ab", b"")
EOS = 3
LANGUAGES = {
    "a(ba)?b?": ("a", "ab", "aba", "abab"),
    "(ab|b){1,2}": ("ab", "b", "abab", "abb", "bab", "bb"),
    "aab": ("aab",),
    "b*a?": tuple("b" * number + end for number in range(8) for end in ("", "a")),
}
"""Regular expressions, and all texts of each that are short enough."""


class Toy:
    """A tokenizer of these tokens."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 - has none
    name_or_path = "toy"

    def __len__(self) -> int:
        return len(TOKENS)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [TOKENS[token].decode() for token in ids]

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[{"a": 0, "b": 1}.get(letter, EOS) for letter in text])


VOCABULARY = Vocabulary(Toy(), len(TOKENS), (EOS,))  # type: ignore[arg-type]


@cache
def allowed_after(regex: str, prefix: tuple[int, ...]) -> tuple[bool, ...]:
    """Which tokens may follow a prefix; all after a prefix that cannot be."""
    if EOS in prefix:
        return (True,) * len(TOKENS)
    text = b"".join(TOKENS[token] for token in prefix).decode()
    begins = [any(whole.startswith(text + one.decode()) for whole in LANGUAGES[regex]) for one in TOKENS[:EOS]]
    found = (*begins, text in LANGUAGES[regex])
    return found if any(found) else (True,) * len(TOKENS)


def allowed_at(regex: str, length: int) -> Tensor:
    """Which tokens (V^t, V) may follow each prefix of a length."""
    return torch.tensor([allowed_after(regex, prefix) for prefix in product(range(len(TOKENS)), repeat=length)])

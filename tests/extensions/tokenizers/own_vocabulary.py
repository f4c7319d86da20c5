"""A draft with tokens of its own over a target of 11 tokens, and its text straight from the definition."""

from collections.abc import Callable, Sequence

from llama_ssp.extensions.tokenizers.alignment import Alignment
from llama_ssp.extensions.tokenizers.drafter import IntersectionDrafter
from llama_ssp.extensions.tokenizers.records import OWN_SLOTS_PER_SLOT
from llama_ssp.models.runner import Runner
from llama_ssp.speculate.sampling.rules import Rule
from tests.helpers.decoders import parts_of

NUM_IDS, NUM_OWN_IDS = 11, 9
ALIGNMENT = Alignment(
    shared=(3, None, 8, 0, None, 5, 1, None, 2, 7, None),
    pieces=((3,), (4, 4, 6), (8,), (0,), (6, 4, 3, 1), (5,), (1,), (4, 6), (2,), (7,), (6,)),
)
"""Tokens 1, 4, 7 and 10 of the target are spelled by several tokens of the draft, or by one that it has alone."""


def spelled(ids: Sequence[int]) -> list[int]:
    """Two tokens begin a text, then come the pieces of each token."""
    return [6, 4, *(piece for token in ids for piece in ALIGNMENT.pieces[token])]


def own_text(prompt_ids: Sequence[int], new_ids: Sequence[int], *, most: int) -> list[int]:
    """The draft's text, token by token: at most two of its tokens for each of the target's."""
    num_tokens = len(prompt_ids)
    text = spelled(prompt_ids)[-min(OWN_SLOTS_PER_SLOT * num_tokens, most) :]
    for token in new_ids:
        num_tokens += 1
        room = min(OWN_SLOTS_PER_SLOT * num_tokens, most) - len(text)
        text += ALIGNMENT.pieces[token][:room]
    return text


class Spelling:
    """A `TokenizerPair` of these tokens, or of others that have equal ones."""

    def __init__(self, alignment: Alignment = ALIGNMENT, encode: Callable[..., list[int]] = spelled) -> None:
        self._alignment, self._encode = alignment, encode

    def align(self, **_sizes: int) -> Alignment:
        return self._alignment

    def into_draft(self, ids: Sequence[int], *, size: int) -> list[int]:
        del size
        return self._encode(ids)


def intersection_drafter(
    runner: Runner,
    rule: Rule,
    *,
    num_draft_tokens: int = 3,
    kind: type[IntersectionDrafter] = IntersectionDrafter,
    spelling: Spelling = Spelling(),  # noqa: B008
) -> IntersectionDrafter:
    """The drafter of a runner with 9 ids."""
    parts = parts_of(runner, rule=rule, num_draft_tokens=num_draft_tokens, vocab_size=NUM_IDS, prepared=spelling)
    return kind(parts)

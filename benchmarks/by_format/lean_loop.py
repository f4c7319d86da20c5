"""Plain and speculative decoding over a library that has forwards, with as little between them as can be.

Drafts are drawn and verified by the rule of Chen et al., so that the text keeps the target's distribution.
llama.cpp's own programs draft the likeliest token and keep it if the target draws it too, which accepts less.

Source: Chen et al. 2023, arXiv:2302.01318, Algorithm 2.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float32]
"""Of every token of the vocabulary."""


class Decodes(Protocol):
    """A model with a cache of one row."""

    def decode(self, tokens: Sequence[int], *, first: int, all_scored: bool = False) -> None:
        """Run tokens at positions from `first` on; the last one is scored, or all are."""

    def draw(self) -> int:
        """The token after the last one of the last `decode`."""

    def probabilities(self, place: int = -1) -> Probabilities:
        """What `draw` would draw from, after a token that was scored, by its place in the last `decode`."""

    def forget(self, *, first: int) -> None:
        """Drop positions from `first` on."""


def plain(model: Decodes, prompt_ids: Sequence[int], *, num_new_tokens: int) -> tuple[list[int], int]:
    """Complete a prompt; returns the new tokens, and the number of forwards after the prompt's own."""
    model.forget(first=0)
    model.decode(prompt_ids, first=0)
    tokens = [model.draw()]
    while len(tokens) < num_new_tokens:
        model.decode(tokens[-1:], first=len(prompt_ids) + len(tokens) - 1)
        tokens.append(model.draw())
    return tokens, num_new_tokens - 1


def drawn(weights: Probabilities, draws: np.random.Generator) -> int:
    """Draw a token; weights need not sum to 1."""
    sums = np.cumsum(weights)
    return int(min(np.searchsorted(sums, draws.random() * sums[-1], side="right"), len(sums) - 1))


def speculative(
    target: Decodes,
    draft: Decodes,
    prompt_ids: Sequence[int],
    *,
    num_new_tokens: int,
    num_draft_tokens: int,
    draws: np.random.Generator,
) -> tuple[list[int], int]:
    """Complete a prompt; returns the new tokens, and the number of rounds."""
    for model in (target, draft):
        model.forget(first=0)
        model.decode(prompt_ids, first=0)
    text = [*prompt_ids, target.draw()]
    length, num_rounds, num_in_draft = len(prompt_ids) + num_new_tokens, 0, len(prompt_ids)
    while len(text) < length:
        last, num_rounds = len(text) - 1, num_rounds + 1
        drafted: list[int] = []
        draft_probs: list[Probabilities] = []
        missing = text[num_in_draft:]  # the last token, and the one before it if all of a draft was kept
        for _ in range(min(num_draft_tokens, length - len(text) - 1)):
            draft.decode(missing, first=last + 1 + len(drafted) - len(missing))
            draft_probs.append(draft.probabilities())
            drafted.append(drawn(draft_probs[-1], draws))
            num_in_draft, missing = last + len(drafted), drafted[-1:]
        target.decode([text[last], *drafted], first=last, all_scored=True)
        text += verified(target, drafted, draft_probs, draws)
        num_in_draft = min(num_in_draft, len(text) - 1)
        target.forget(first=len(text) - 1)
        draft.forget(first=num_in_draft)
    return text[len(prompt_ids) :], num_rounds


def verified(
    target: Decodes, drafted: Sequence[int], draft_probs: Sequence[Probabilities], draws: np.random.Generator
) -> list[int]:
    """The drafted tokens that are kept, and one of the target's."""
    kept: list[int] = []
    for place, (token, probs) in enumerate(zip(drafted, draft_probs, strict=True)):
        target_probs = target.probabilities(place)
        if draws.random() * probs[token] >= target_probs[token]:
            return [*kept, drawn(np.maximum(target_probs - probs, 0), draws)]
        kept.append(token)
    return [*kept, drawn(target.probabilities(len(drafted)), draws)]

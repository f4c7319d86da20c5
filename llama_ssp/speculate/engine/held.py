"""The texts that rows of the caches hold, so that prompts which begin alike are read once up to where they differ.

    row 0, running   | header ........ | question 0 | answer so far     holds its prompt
    row 1, ended     | header ........ | question 1 | answer |          all but the last token
    row 2, vacant    | - - - |                                          nothing: rounds write into vacant rows
    a new prompt     | header ........ | question 3 |                   takes row 2, and the header from row 0
    a later turn     | header ........ | question 1 | answer | more |   takes row 1 as it is, and reads what is new

Texts stay in the static cache until their row is used, so no memory is added. All ranks know the tokens of all rows, so
they decide alike without a message. Bits stay the same: where those of a token depend on what else is read with it,
only whole chunks of prompts are taken.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llama_ssp.models.prefill import Held, num_common

NEVER = 2**62
"""The step of models whose layers keep states (`models.states`): those behind a common beginning are gone.

Only an equal prompt that is read at the same time is copied, with its states.
"""
LEAST_TOKENS = 32
"""A shorter beginning is read again: that is as fast."""


class _Text(NamedTuple):
    """Tokens that a row of the target's cache holds; the draft's cache has the first `num_prompt`."""

    ids: tuple[int, ...] = ()
    num_prompt: int = 0


class PromptRow(NamedTuple):
    """Where a prompt goes: its row, and what the caches of the target and of the draft hold of it."""

    row: int
    target: Held
    draft: Held


class HeldTexts:
    """The texts that rows hold, whose beginnings can be taken in multiples of `step` tokens."""

    def __init__(self, num_rows: int, *, step: int) -> None:
        self._texts, self._step = [_Text()] * num_rows, step

    def forget(self, rows: Iterable[int]) -> None:
        """Mark these rows as empty."""
        for row in rows:
            self._texts[row] = _Text()

    def forget_drafts(self, rows: Iterable[int]) -> None:
        """Enter that the draft's cache holds nothing of the prompts in these rows."""
        for row in rows:
            self._texts[row] = self._texts[row]._replace(num_prompt=0)

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Enter that a row holds new tokens behind its prompt."""
        text = self._texts[row]
        self._texts[row] = text._replace(ids=(*text.ids, *ids))

    def num_held(self, ids: tuple[int, ...]) -> int:
        """How many tokens of a prompt a row holds that it can take."""
        source, most = _longest(ids, dict(enumerate(self._texts)))
        return 0 if source is None else self._usable(ids, most)

    def place(self, prompts: Sequence[tuple[int, ...]], free: Sequence[int]) -> list[PromptRow]:
        """Give each prompt a free row, that which holds most of it, and enter the prompts."""
        left, rows = [*free], []
        for ids in prompts:
            rows.append(self._row_for(ids, left))
            left.remove(rows[-1])
        # What stays while these prompts are read: other rows, and prompts that are read from their first token on.
        sources = {row: text for row, text in enumerate(self._texts) if text.ids and row not in rows}
        seen: dict[tuple[int, ...], int] = {}
        places = []
        for row, ids in zip(rows, prompts, strict=True):
            if ids in seen:
                places.append(PromptRow(row, *[Held(len(ids), seen[ids])] * 2))
                continue
            seen[ids] = row
            places.append(self._begun(row, ids, {row: self._texts[row]} | sources))
            if not places[-1].target.num_tokens:
                sources[row] = _Text(ids, len(ids))
        for row, ids in zip(rows, prompts, strict=True):
            self._texts[row] = _Text(ids, len(ids))
        return places

    def _row_for(self, ids: tuple[int, ...], free: Sequence[int]) -> int:
        row, _ = _longest(ids, {row: self._texts[row] for row in free})
        return min(free, key=lambda row: len(self._texts[row].ids)) if row is None else row

    def _begun(self, row: int, ids: tuple[int, ...], texts: dict[int, _Text]) -> PromptRow:
        source, most = _longest(ids, texts)
        num_tokens = self._usable(ids, most)
        if source is None or not num_tokens:
            return PromptRow(row, Held(), Held())
        num_of_prompt = min(num_tokens, texts[source].num_prompt)
        return PromptRow(row, Held(num_tokens, source), Held(num_of_prompt, source))

    def _usable(self, ids: tuple[int, ...], most: int) -> int:
        num_tokens = min(most, len(ids) - 1) // self._step * self._step  # the last one is read, for its logits
        return num_tokens if num_tokens >= LEAST_TOKENS else 0


def _longest(ids: tuple[int, ...], texts: dict[int, _Text]) -> tuple[int | None, int]:
    """The first row of those that hold most of a prompt, and how much; None if all hold too little."""
    found, most = None, LEAST_TOKENS - 1
    for row, text in texts.items():
        if len(text.ids) > most and text.ids[: most + 1] == ids[: most + 1]:
            found, most = row, num_common(text.ids, ids)
    return found, most

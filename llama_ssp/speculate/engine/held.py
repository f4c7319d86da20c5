"""The texts that rows of the caches hold, so that prompts which begin alike are read once up to where they differ.

    row 0, running   | header ........ | question 0 | answer so far     holds its prompt
    row 1, ended     | header ........ | question 1 | answer |          all but the last token
    row 2, vacant    | - - - |                                          nothing: rounds write into vacant rows
    a new prompt     | header ........ | question 3 |                   takes row 2, and the header from row 0
    a later turn     | header ........ | question 1 | answer | more |   takes row 1 as it is, and reads what is new

Texts stay in the static cache until their row is used, so no memory is added. All ranks know the tokens of all rows, so
they decide alike without a message. Bits stay the same: if a token's bits depend on the other tokens of a forward, only
whole chunks of prompts are taken.

If layers keep states (`models.states`), a row also saves one after whole chunks of its prompt, and only these tokens
are taken from it: chunks that another prompt shares, or all whole chunks if none does or it is a later turn.

    row 0    | header .... S question 0 | answer       another prompt has the header as well
    row 1    | first turn ....... S     | answer       the next turn goes on from S; the rest of the chunk is read again

If a draft head sees a window, the taps before the newest tokens of a text are gone, and the head needs the taps before
the end of a prompt. So a prompt longer than the text that a row has read takes all tokens that they share, and a
shorter one the tokens before its own window, whose taps are written again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from torch import Tensor

from llama_ssp.architectures.engine import PREFILL_CHUNK
from llama_ssp.models.prefill import Held, num_common
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm

LEAST_TOKENS = 32
"""A shorter beginning is read again: that is as fast."""


class _Text(NamedTuple):
    """Tokens that a row of the target's cache holds.

    Attributes:
        num_prompt: how many of them, from the first on, the draft's cache holds too.
        saved: the number of tokens after which a state is saved; 0 for none.
        num_read: how many tokens an ended row has read; None while it still reads.
    """

    ids: tuple[int, ...] = ()
    num_prompt: int = 0
    saved: int = 0
    num_read: int | None = None


class PromptRow(NamedTuple):
    """The row of a prompt, its parts in the caches of the target and of the draft, and `Prompts.saved`."""

    row: int
    target: Held
    draft: Held
    saved: int = 0


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """How the models of a round reuse texts that rows hold, the same on every rank.

    Attributes:
        are_invariant: whether all models are batch-invariant (`Runner.is_invariant`).
        from_states: whether a model has recurrent layers, so that a text can be reused only up to a saved state.
        num_spare: rows beside the batch's that keep texts which have ended.
        num_tapped: how many of the first and of the newest tokens keep their taps for a draft head; None for all.
        spare: the tensors of the spare rows.
    """

    are_invariant: bool
    from_states: bool
    num_spare: int = 0
    num_tapped: int | None = None
    spare: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, models: Sequence[Runner | None], comm: Comm) -> Self:
        """Ask all ranks of `comm`, which call this together; a rank may have no part of a model."""
        held = [model for model in models if model]
        are_invariant = comm.gather_text("invariant" if all(model.is_invariant for model in held) else "")
        keep_states = comm.gather_text("states" if any(model.is_recurrent for model in held) else "")
        return cls(are_invariant=all(are_invariant), from_states=any(keep_states))

    @property
    def any_length(self) -> bool:
        """Whether a text can be reused up to any token."""
        return self.are_invariant and not self.from_states

    @property
    def step(self) -> int:
        """A number of tokens; texts are reused up to multiples of it."""
        return 1 if self.any_length else PREFILL_CHUNK


class HeldTexts:
    """The texts that rows hold, which can be reused up to multiples of `step` tokens.

    With `from_states`, they can be reused up to a saved state. The last `num_spare` rows are spare ones. For
    `num_tapped` see `Reuse`.
    """

    def __init__(
        self, num_rows: int, *, step: int, from_states: bool = False, num_spare: int = 0, num_tapped: int | None = None
    ) -> None:
        self._num_tapped = num_tapped
        self._texts, self._step, self._from_states = [_Text()] * (num_rows + num_spare), step, from_states
        self.num_rows, self._used = num_rows, dict.fromkeys(range(num_rows, num_rows + num_spare), 0)
        self._num_uses = 0

    def forget(self, rows: Iterable[int]) -> None:
        """Mark these rows as empty."""
        for row in rows:
            self._texts[row] = _Text()

    def forget_drafts(self, rows: Iterable[int]) -> None:
        """Record that the draft's cache holds nothing of the prompts in these rows."""
        for row in rows:
            self._texts[row] = self._texts[row]._replace(num_prompt=0)

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Record that a row holds new tokens after its prompt."""
        text = self._texts[row]
        self._texts[row] = text._replace(ids=(*text.ids, *ids))

    def end(self, row: int, num_read: int) -> None:
        """Record that a row has read `num_read` tokens, and reads no more."""
        self._texts[row] = self._texts[row]._replace(num_read=num_read)

    def keep(self, row: int) -> tuple[int, int] | None:
        """Record that a spare row also holds the text of a row; returns the spare row and the number of tokens to copy.

        Returns None if nothing has to be copied. The text replaces a spare text that is mostly the same; if there is
        none, the one that was used least recently.
        """
        text = self._texts[row]
        if not self._used or len(text.ids) < LEAST_TOKENS:
            return None
        common, spare = max((num_common(self._texts[spare].ids, text.ids), spare) for spare in self._used)
        if common == len(text.ids):
            self._use(spare)
            return None
        if 2 * common <= len(self._texts[spare].ids) or not common:
            spare = min(self._used, key=self._used.__getitem__)
        self._texts[spare] = text._replace(num_prompt=0)
        self._use(spare)
        return spare, len(text.ids)

    def _use(self, row: int) -> None:
        if row in self._used:
            self._num_uses += 1
            self._used[row] = self._num_uses

    def num_held(self, ids: tuple[int, ...]) -> int:
        """Number of tokens of a prompt that can be reused from some row."""
        return self._begun(0, ids, dict(enumerate(self._texts))).target.num_tokens

    def place(self, prompts: Sequence[tuple[int, ...]], free: Sequence[int]) -> list[PromptRow]:
        """Give each prompt the free row that holds most of it, and record the prompts as held there."""
        left, rows = [*free], []
        for ids in prompts:
            row, _ = self._longest(ids, {row: self._texts[row] for row in left})
            rows.append(min(left, key=lambda row: len(self._texts[row].ids)) if row is None else row)
            left.remove(rows[-1])
        # These stay while the prompts are read: other rows, and prompts that are read from their first token on.
        sources = {row: text for row, text in enumerate(self._texts) if text.ids and row not in rows}
        held = {text.ids for text in self._texts}
        seen: dict[tuple[int, ...], int] = {}
        places: list[PromptRow] = []
        for row, ids in zip(rows, prompts, strict=True):
            if ids in seen:
                equal = places[seen[ids]]
                whole = Held(len(ids), equal.row)
                places.append(PromptRow(row, whole, whole, equal.saved))
                continue
            seen[ids] = len(places)
            begun = self._begun(row, ids, {row: self._texts[row]} | sources)
            places.append(begun._replace(saved=self._to_save(ids, held | ({*prompts} - {ids}))))
            if not begun.target.num_tokens:
                sources[row] = _Text(ids, len(ids), places[-1].saved)
        for place, ids in zip(places, prompts, strict=True):
            self.enter(place, ids)
        return places

    def enter(self, place: PromptRow, ids: tuple[int, ...]) -> None:
        """Record that a row holds a prompt."""
        self._texts[place.row] = _Text(ids, len(ids), place.saved)

    def _to_save(self, ids: tuple[int, ...], others: Iterable[tuple[int, ...]]) -> int:
        """Number of tokens of a prompt after which the state is saved."""
        whole = self._whole_steps(ids, len(ids))
        if not self._from_states or not whole:
            return 0
        shared, goes_on = max((num_common(other, ids), ids[: len(other)] == other) for other in (*others, ()))
        return whole if goes_on else self._whole_steps(ids, shared) or whole

    def _begun(self, row: int, ids: tuple[int, ...], texts: dict[int, _Text]) -> PromptRow:
        source, most = self._longest(ids, texts)
        if source is not None and self._num_tapped is not None:
            most = self._with_taps(ids, most, texts[source].num_read)
        num_tokens = self._whole_steps(ids, most)
        if source is None or num_tokens < LEAST_TOKENS:
            return PromptRow(row, Held(), Held())
        num_of_prompt = min(num_tokens, texts[source].num_prompt)
        self._use(source)
        target, draft = (Held(number, source, self._from_states) for number in (num_tokens, num_of_prompt))
        return PromptRow(row, target, draft)

    def _with_taps(self, ids: tuple[int, ...], most: int, num_read: int | None) -> int:
        """Return how many of the first `most` tokens of a prompt can come from a row that keeps only some taps."""
        if num_read is not None and len(ids) > num_read:
            return most
        before = max(len(ids) - 1 - (self._num_tapped or 0), 0)
        return most if most <= before else before * (not self._from_states)

    def _whole_steps(self, ids: tuple[int, ...], most: int) -> int:
        return min(most, len(ids) - 1) // self._step * self._step  # the last one is read, for its logits

    def _longest(self, ids: tuple[int, ...], texts: dict[int, _Text]) -> tuple[int | None, int]:
        """Return the first row that holds most of a prompt, and how many tokens; None if all rows hold too few."""
        found, most = None, LEAST_TOKENS - 1
        for row, text in texts.items():
            given = text.ids[: text.saved] if self._from_states else text.ids
            if len(given) > most and given[: most + 1] == ids[: most + 1]:
                common = num_common(given, ids)
                if common == len(given) < len(ids) or not self._from_states:
                    found, most = row, common
        return found, most

"""The rows of a batch: whose completion decodes in each, which are free, and what drafters have not read of them."""

from collections.abc import Mapping, Sequence

from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.round import DraftChoice


class RowTable:
    """The rows of a batch, as the host sees them.

    Attributes:
        owners: the completion that decodes in each row, or None.
        reserved: rows whose texts are read or scored chunk by chunk, with the lengths of these texts.
    """

    def __init__(self, batch_size: int) -> None:
        self.owners: list[RowCompletion | None] = [None] * batch_size
        self.reserved: dict[int, int] = {}

    @property
    def decoding(self) -> list[RowCompletion]:
        """The completions that decode, by row."""
        return [owner for owner in self.owners if owner]

    @property
    def free(self) -> list[int]:
        """Rows in which no completion decodes and no text is read or scored."""
        return [row for row, owner in enumerate(self.owners) if owner is None and row not in self.reserved]

    def take(self, rows: Sequence[int], owners: Sequence[RowCompletion]) -> None:
        """Let completions decode in rows."""
        for row, owner in zip(rows, owners, strict=True):
            self.owners[row] = owner

    def leave(self, owner: RowCompletion) -> int:
        """Free the row of a completion; returns its number."""
        row = self.owners.index(owner)
        self.owners[row] = None
        return row


def computed_rows(rows: Sequence[int], *, most: int) -> list[int]:
    """Pad the rows to the next batch size that is traced, at most `most`, by repeating the first row.

    Such sizes are powers of two and one and a half times these; they are few, since each has traces of its own.
    """
    power = 1 << (len(rows) - 1).bit_length()
    size = min(power * 3 // 4 if len(rows) <= power * 3 // 4 else power, most)
    return [*rows, *[rows[0]] * (size - len(rows))]


class Backlog:
    """Counts tokens that drafters have not read: prompts, and tokens of rounds in which they did not draft.

    Attributes:
        num_tokens: for each drafter, the tokens that it has to read before it drafts.
    """

    def __init__(self, num_drafters: int) -> None:
        self._num_skipped = [0] * num_drafters
        self._prompts: list[dict[int, int]] = [{} for _ in range(num_drafters)]
        self.num_tokens = [0] * num_drafters

    def take_prompts(self, source: int) -> Mapping[int, int]:
        """The rows whose prompts a drafter is going to read now, with the lengths of these prompts."""
        taken, self._prompts[source] = self._prompts[source], {}
        self.num_tokens[source] = self._num_skipped[source]
        return taken

    def add_prompts(self, source: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Record prompts that a drafter has not read."""
        self._prompts[source].update(zip(rows, lengths, strict=True))
        self._add_up()

    def count(self, choice: DraftChoice) -> None:
        """Count the tokens that each drafter will have skipped after a round."""
        for source, skipped in enumerate(self._num_skipped):
            drafted = choice.num_tokens and source == choice.source
            self._num_skipped[source] = 0 if drafted else skipped + choice.num_tokens + 1
        self._add_up()

    def begin(self) -> None:
        """Record that all rows are new: no tokens of rounds were skipped, and whole prompts have to be read."""
        self._num_skipped = [0] * len(self._num_skipped)
        self._add_up()

    def forget(self, row: int) -> None:
        """Record that a row has ended."""
        for lengths in self._prompts:
            lengths.pop(row, None)
        self._add_up()

    def _add_up(self) -> None:
        for source, (skipped, lengths) in enumerate(zip(self._num_skipped, self._prompts, strict=True)):
            self.num_tokens[source] = skipped + max(lengths.values(), default=0)

"""Rows beside the rows of a batch, for texts that have ended: no round reads or writes them.

    rows of the batch   | header ........ | question 1 | answer |        ends: its text is copied to a spare row
    spare rows          | header ........ | question 1 | answer |        until room is needed
    a new prompt        | header ........ | question 2 |                 copies the header from there

They hold what the target has read, and the taps of a head. Drafts read these texts again.

Shapes: A parts of all rows' slots, B rows, S slots, W width of a part of a slot.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llama_ssp.models.cache import CachedRunner, Taps
from llama_ssp.models.runner import Runner


class SpareRows:
    """Copies of rows of a target and of its taps, on this rank; memory is allocated when the first row is copied.

    The list `kept` has the tensors, which other decoders of the same models share; only the decoder that ran last holds
    texts in them.
    """

    def __init__(self, target: Runner, taps: Taps | None, num_rows: int, kept: list[Tensor]) -> None:
        self._target, self._taps, self._num_rows, self._kept = target, taps, num_rows, kept

    def keep(self, row: int, spare: int, num_tokens: int) -> None:
        """Copy the first tokens of a row to a spare row."""
        for kept_ABSW, rows_ABSW in self._pairs():
            number = min(num_tokens, rows_ABSW.shape[2])  # of a window's taps, which other decoders may have more of
            kept_ABSW[:, spare, :number].copy_(rows_ABSW[:, row, :number])

    def fetch(self, spare: int, row: int, num_tokens: int) -> None:
        """Copy the first tokens of a spare row back to a row."""
        for kept_ABSW, rows_ABSW in self._pairs():
            number = min(num_tokens, rows_ABSW.shape[2])
            rows_ABSW[:, row, :number].copy_(kept_ABSW[:, spare, :number])

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of spare rows, enlarged if necessary, with the tensor of the batch's rows."""
        for number, rows_ABSW in enumerate(self._rows()):
            num_parts, _, num_slots, width = rows_ABSW.shape
            before = self._kept[number] if number < len(self._kept) else None
            if before is None or before.shape[2] < num_slots:
                with torch.inference_mode(mode=False):
                    kept_ABSW = rows_ABSW.new_zeros(num_parts, self._num_rows, num_slots, width)
                if before is not None:
                    kept_ABSW[:, :, : before.shape[2]].copy_(before)
                self._kept[number : number + 1] = [kept_ABSW]
            yield self._kept[number], rows_ABSW

    def _rows(self) -> Iterator[Tensor]:
        if isinstance(self._target, CachedRunner):
            yield from self._target.cache.in_rows()
        if self._taps:
            yield self._taps.in_rows()[None]

"""The taps of a target for a head that sees a window: of the first tokens of a text, and of the newest.

    positions        | 0 .. S-1 | ............... | P-N ............. P-1 | of a text of P tokens
    slots of a row   | 0 .. S-1 | S ............................... S+N-1 | no tap that is read |
                                  position p is in slot S + (p - S) mod N

N is the window and what rounds write before and after it, see `engine.tap_slots`. Of a prompt only the taps that stay
are written: all others, and what fills a shorter prompt up, go to the last slot, so that no forward writes two taps to
a slot that is read. No slot has a higher number than its position, so the first slots of a row hold a text's beginning.

Shapes: B rows, R rows of prompts, T positions, M tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llama_ssp.architectures.engine import PREFILL_CHUNK, tap_slots
from llama_ssp.extensions.windows.records import WindowConfig
from llama_ssp.models.cache import Taps
from llama_ssp.models.upload import to_device


class WindowTaps(Taps):
    """See the module; `num_drafted` are the most tokens that a round drafts."""

    def __init__(self, layers: Sequence[int], *, draft: WindowConfig, num_drafted: int, **how: Any) -> None:
        super().__init__(layers, **how)
        assert draft.window is not None
        self._sinks, self._window, self._num_drafted = draft.sinks, draft.window, num_drafted

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """See `Taps.allocate`."""
        before, num_kept = self.num_allocations, self._sinks + self._window
        most = tap_slots(num_kept, self._num_drafted, num_slots=num_slots)
        super().allocate(batch_size=batch_size, num_slots=most)
        if self.num_allocations != before:
            self._stops_B1 = torch.zeros(batch_size, 1, dtype=torch.int64, device=self._device)
            # A tensor: traces outlive the size.
            self._num_newest = torch.tensor(max(self._num_slots - 1 - self._sinks, 1), device=self._device)
            self._of_prompts = _OfPrompts(self)

    def of_prompts(self, lengths_R: Tensor, rows: Sequence[int]) -> Taps:
        """See `Taps.of_prompts`."""
        self._stops_B1.index_copy_(0, to_device(rows, self._device), lengths_R[:, None])
        return self._of_prompts

    def slots(self, positions_BT: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """See `Taps.slots`."""
        return super().slots(self._turned(positions_BT), rows_B)

    def slots_of_prompts(self, positions_BT: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """Return the slots of tokens of prompts; see `slots`."""
        stops_B1 = self._stops_B1 if rows_B is None else self._stops_B1.index_select(0, rows_B)
        stays_BT = (positions_BT >= stops_B1 - self._num_newest) | (positions_BT < self._sinks)
        places_BT = self._turned(positions_BT).where(stays_BT & (positions_BT < stops_B1), self._num_slots - 1)
        return super().slots(places_BT, rows_B)

    def _turned(self, positions_BT: Tensor) -> Tensor:
        behind_BT = positions_BT - self._sinks
        return positions_BT.where(behind_BT < 0, behind_BT.remainder(self._num_newest) + self._sinks)

    def read_of_prompts(self, lengths_R: Tensor, *, first: int, longest: int) -> Iterator[Tensor]:
        """See `Taps.read_of_prompts`: what a head sees of each prompt."""
        newest_T = torch.arange(-min(self._window + 1, longest), 0, device=lengths_R.device)
        sinks_RT = newest_T.new_zeros(len(lengths_R), 1) + torch.arange(self._sinks, device=lengths_R.device)
        positions_RT = torch.cat([sinks_RT, lengths_R[:, None] + newest_T], dim=1)
        last_R1 = lengths_R[:, None] - 1
        yield from positions_RT.clamp_min(0).minimum(last_R1).split(PREFILL_CHUNK, dim=1)

    def read_of_newest(self, positions_BT: Tensor) -> Tensor:
        """See `Taps.read_of_newest`: the sinks and the window that a restarted head reads."""
        most = self._window + self._num_drafted + 2
        if positions_BT.shape[1] <= most:
            return positions_BT
        first_S = torch.arange(self._sinks, device=positions_BT.device)
        return torch.cat([first_S.minimum(positions_BT[:, -1:]), positions_BT[:, -most:]], dim=1)


class _OfPrompts(Taps):
    """The taps of a `WindowTaps`, as forwards of prompts write them."""

    def __init__(self, whole: WindowTaps) -> None:
        self._whole, self.layers = whole, whole.layers

    def slots(self, positions_BT: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """See `Taps`."""
        return self._whole.slots_of_prompts(positions_BT, rows_B)

    def write(self, layer: int, x_ME: Tensor, slots_M: Tensor) -> None:
        """See `Taps`."""
        self._whole.write(layer, x_ME, slots_M)

    def at(self, layer: int, slots_M: Tensor) -> Tensor:
        """See `Taps`."""
        return self._whole.at(layer, slots_M)

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int) -> None:
        """See `Taps`."""
        self._whole.copy(from_row, to_rows, num_tokens)

"""States of recurrent layers, kept after each of the last tokens of a row, so that a rollback copies nothing.

A layer of the cache keeps slots (`models.cache`), or states of this module, or both: the last inputs of a convolution,
and a recurrent state. Both stand in a ring by position:

    R = 5 states, slot p mod R   | 10 | 11 | 7 | 8 | 9 |     after the token at position p
    a forward from position p    reads the state after p - 1, zeros at position 0; writes the states after its tokens
    rollback                     = the next forward begins at a smaller position, at most R - 1 tokens back

So a forward depends on its positions alone, as with slots of keys and values. Of more than R tokens only the last state
is written: a prompt is not taken back. Tokens that do not count, such as padding, leave no trace: a row can take fewer
tokens than the forward has, or none.

Snapshots, and no lazy commit (keep one state, take accepted tokens in once more): a draft takes in tokens that may be
rejected in every step, so its commits would lag by K + 1 tokens and each of its steps take them in again. A round
writes K + 1 states and reads one, a few percent of the weights that it reads; a plan counts them.

Shapes: B sequences, T tokens, N kept states, W width of a convolution, C channels, I kept inputs.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.architectures.engine import kept_inputs
from llama_ssp.kernels.recurrence import Places
from llama_ssp.models.graph_inputs import Workspace


class LayerState(NamedTuple):
    """Sizes of the state that a recurrent layer keeps of a row, on this rank.

    Attributes:
        number: the number of the layer in its model.
        num_channels: the channels of its convolution.
        width: tokens that the convolution sees, the newest included.
        shape: the shape of the recurrent state, which is in fp32; empty without one.
        device: the device of the layer.
    """

    number: int
    num_channels: int
    width: int
    shape: tuple[int, ...]
    device: torch.device


class StateCache(Workspace):
    """The states of all recurrent layers, of `batch_size` rows.

    Attributes:
        num_kept: states of a row, R.
    """

    def __init__(self, layers: Sequence[LayerState], *, batch_size: int, num_kept: int, dtype: torch.dtype) -> None:
        self.num_rows, self.num_kept = batch_size, num_kept
        self.width = max(layer.width for layer in layers)
        self.num_inputs, device = kept_inputs(num_kept, self.width), layers[0].device
        with torch.inference_mode(mode=False):  # else they could not be written outside of it
            self.inputs = {
                layer.number: torch.zeros(
                    batch_size * self.num_inputs, layer.num_channels, dtype=dtype, device=layer.device
                )
                for layer in layers
            }
            self.states = {
                layer.number: torch.zeros(batch_size * num_kept, *layer.shape, device=layer.device)
                for layer in layers
                if layer.shape
            }
            self._rows_B = torch.arange(batch_size, device=device)

    def view(self, positions_BT: Tensor, *, taken_B: Tensor | None, cache_rows_B: Tensor | None) -> "StateView":
        """Make the view of one forward; for the arguments see `Runner.forward`."""
        rows_B = self._rows_B if cache_rows_B is None else cache_rows_B
        return StateView(self, positions_BT, taken_B, rows_B.to(positions_BT.device))

    def copy(self, from_row: int, to_rows: Sequence[int]) -> None:
        """Copy all states and inputs that are kept of a row to other rows."""
        for whole in (*self.inputs.values(), *self.states.values()):
            in_rows = whole.unflatten(0, (self.num_rows, -1))
            for row in to_rows:
                in_rows[row].copy_(in_rows[from_row])

    def take(self, other: "StateCache", from_row: int, to_rows: Sequence[int], num_tokens: int) -> None:
        """Copy inputs and states after the first tokens of a row of a cache with as many rows to rows of this one."""
        places_W = torch.arange(num_tokens - self.width + 1, num_tokens, device=self._rows_B.device)
        for own, others, places in ((self.inputs, other.inputs, places_W), (self.states, other.states, places_W[-1:])):
            for number, whole in own.items():
                rings, from_rings = (each.unflatten(0, (self.num_rows, -1)) for each in (whole, others[number]))
                on_device = places.to(whole.device)
                kept = from_rings[from_row].index_select(0, on_device % from_rings.shape[1])
                for row in to_rows:
                    rings[row].index_copy_(0, on_device % rings.shape[1], kept)


class StateView:
    """The part of a `StateCache` that one forward reads and writes.

    Attributes:
        keeps_all: states after each of the tokens are kept.
    """

    def __init__(self, cache: StateCache, positions_BT: Tensor, taken_B: Tensor | None, rows_B: Tensor) -> None:
        self._cache, self._taken_B, self._rows_B = cache, taken_B, rows_B
        self._first_B1, self._num_tokens = positions_BT[:, :1], positions_BT.shape[1]
        self.keeps_all = self._num_tokens <= cache.num_kept

    @cached_property
    def _offsets(self) -> Tensor:
        return torch.arange(self._num_tokens, device=self._first_B1.device)

    @cached_property
    def _taken_rows(self) -> Tensor:
        taken_B = self._taken_B
        return torch.full_like(self._first_B1, self._num_tokens) if taken_B is None else taken_B[:, None]

    @cached_property
    def takes(self) -> Tensor:
        """The tokens that count."""
        return self._offsets < self._taken_rows

    @cached_property
    def _state_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return whether each sequence begins here, the rows of the states to read, and the rows to write."""
        num_kept, first_B1, offsets_T = self._cache.num_kept, self._first_B1, self._offsets
        counts_N = offsets_T + 1 if self.keeps_all else offsets_T[-1:] + 1
        behind_BN = first_B1 - 1 + counts_N.minimum(self._taken_rows)
        rows_B1 = self._rows_B[:, None] * num_kept
        read_B = (rows_B1 + (first_B1 - 1).remainder(num_kept)).flatten()
        return first_B1[:, 0] == 0, read_B, (rows_B1 + behind_BN.remainder(num_kept)).flatten()

    @cached_property
    def _input_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return which inputs precede the text, the rows to read, the last inputs that count, and the rows to write."""
        num_inputs, first_B1 = self._cache.num_inputs, self._first_B1
        num_before, num_last = self._cache.width - 1, min(self._num_tokens, num_inputs)
        rows_B1 = self._rows_B[:, None] * num_inputs
        before_BW = first_B1 + torch.arange(-num_before, 0, device=first_B1.device)
        read_M = (rows_B1 + before_BW.remainder(num_inputs)).flatten()
        # May include inputs before the first token, which are rewritten.
        last_BI = (self._taken_rows - num_last + self._offsets[:num_last]).clamp_min(-num_before)
        written_M = (rows_B1 + (first_B1 + last_BI).remainder(num_inputs)).flatten()
        return (before_BW < 0)[..., None], read_M, (last_BI + num_before)[..., None], written_M

    def with_inputs_before(self, number: int, x_BTC: Tensor) -> Tensor:
        """The inputs (B, W - 1 + T, C) of a layer's convolution, with W - 1 before the first token; keeps the last."""
        inputs, device = self._cache.inputs[number], x_BTC.device
        is_before_BW1, read_M, last_BI1, written_M = (part.to(device) for part in self._input_rows)
        before_BWC = inputs.index_select(0, read_M).unflatten(0, (len(x_BTC), -1))
        x_BTC = torch.cat([before_BWC.masked_fill(is_before_BW1, 0), x_BTC], 1)
        last_BIC = x_BTC.gather(1, last_BI1.expand(-1, -1, x_BTC.shape[-1]))
        inputs.index_copy_(0, written_M, last_BIC.flatten(0, 1))
        return x_BTC

    def state(self, number: int) -> Tensor:
        """The state (B, ...) of a layer after the token before the first."""
        states = self._cache.states[number]
        is_new_B, read_B, _ = (part.to(states.device) for part in self._state_rows)
        is_new_B = is_new_B.view(-1, *[1] * (states.dim() - 1))
        return states.index_select(0, read_B).masked_fill(is_new_B, 0)

    def keep(self, number: int, states_BN: Tensor) -> None:
        """Keep the states (B, N, ...) of a layer: after each token if `keeps_all`, else after the last that counts."""
        states = self._cache.states[number]
        states.index_copy_(0, self._state_rows[2].to(states.device), states_BN.flatten(0, 1))

    def places(self, number: int) -> Places:
        """Return the rings of a layer, which a kernel reads and writes itself."""
        cache, inputs = self._cache, self._cache.inputs[number]
        first_B1, rows_B = self._first_B1.to(inputs.device), self._rows_B.to(inputs.device)
        taken_B = None if self._taken_B is None else self._taken_B.to(inputs.device)
        return Places(inputs, cache.states[number], cache.num_inputs, cache.num_kept, first_B1, taken_B, rows_B)

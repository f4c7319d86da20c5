"""States of recurrent layers, kept behind each of the last tokens of a row, so that a rollback copies nothing.

A layer of the cache keeps slots (`models.cache`), or what this module has, or both: the last inputs of a convolution,
and a recurrent state. Both stand in a ring by position:

    R = 5 states, slot p mod R   | 10 | 11 | 7 | 8 | 9 |     behind the token at position p
    a forward from position p    reads the state behind p - 1, zeros at position 0; writes those behind its tokens
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
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.architectures.engine import kept_inputs
from llama_ssp.workspaces import Workspace


class LayerState(NamedTuple):
    """Sizes of the state that a recurrent layer keeps of a row, on this rank.

    Attributes:
        number: of the layer in its model.
        num_channels: of its convolution.
        width: tokens that the convolution sees, the newest included.
        shape: of the recurrent state, which is in fp32; empty without one.
        device: of the layer.
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
        """Copy all that is kept of a row to others."""
        for whole in (*self.inputs.values(), *self.states.values()):
            in_rows = whole.unflatten(0, (self.num_rows, -1))
            for row in to_rows:
                in_rows[row].copy_(in_rows[from_row])


class StateView:
    """The part of a `StateCache` that one forward reads and writes.

    Attributes:
        takes_BT: the tokens that count.
    """

    def __init__(self, cache: StateCache, positions_BT: Tensor, taken_B: Tensor | None, rows_B: Tensor) -> None:
        self._cache = cache
        num_tokens = positions_BT.shape[1]
        device, first_B1, rows_B1 = positions_BT.device, positions_BT[:, :1], rows_B[:, None]
        offsets_T = torch.arange(num_tokens, device=device)
        taken_B1 = torch.full_like(first_B1, num_tokens) if taken_B is None else taken_B[:, None]
        self.takes_BT = offsets_T < taken_B1
        self.keeps_all = num_tokens <= cache.num_kept
        counts_N = offsets_T + 1 if self.keeps_all else offsets_T[-1:] + 1
        behind_BN = first_B1 - 1 + counts_N.minimum(taken_B1)
        state_rows_B1, input_rows_B1 = rows_B1 * cache.num_kept, rows_B1 * cache.num_inputs
        self._is_new_B = positions_BT[:, 0] == 0
        self._read_B = (state_rows_B1 + (first_B1 - 1).remainder(cache.num_kept)).flatten()
        self._written_M = (state_rows_B1 + behind_BN.remainder(cache.num_kept)).flatten()
        num_before, num_last = cache.width - 1, min(num_tokens, cache.num_inputs)
        before_BW = first_B1 + torch.arange(-num_before, 0, device=device)
        self._is_before_BW1 = (before_BW < 0)[..., None]
        self._inputs_read_M = (input_rows_B1 + before_BW.remainder(cache.num_inputs)).flatten()
        # The last inputs that count, perhaps some of those before: they are written again.
        last_BI = (taken_B1 - num_last + offsets_T[:num_last]).clamp_min(-num_before)
        self._last_BI1 = (last_BI + num_before)[..., None]
        self._inputs_written_M = (input_rows_B1 + (first_B1 + last_BI).remainder(cache.num_inputs)).flatten()

    def with_inputs_before(self, number: int, x_BTC: Tensor) -> Tensor:
        """The inputs (B, W - 1 + T, C) of a layer's convolution, with those before the first token; keeps the last."""
        inputs, device = self._cache.inputs[number], x_BTC.device
        before_BWC = inputs.index_select(0, self._inputs_read_M.to(device)).unflatten(0, (len(x_BTC), -1))
        x_BTC = torch.cat([before_BWC.masked_fill(self._is_before_BW1.to(device), 0), x_BTC], 1)
        last_BIC = x_BTC.gather(1, self._last_BI1.to(device).expand(-1, -1, x_BTC.shape[-1]))
        inputs.index_copy_(0, self._inputs_written_M.to(device), last_BIC.flatten(0, 1))
        return x_BTC

    def state(self, number: int) -> Tensor:
        """The state (B, ...) of a layer behind the token before the first."""
        states = self._cache.states[number]
        is_new_B = self._is_new_B.to(states.device).view(-1, *[1] * (states.dim() - 1))
        return states.index_select(0, self._read_B.to(states.device)).masked_fill(is_new_B, 0)

    def keep(self, number: int, states_BN: Tensor) -> None:
        """Keep the states (B, N, ...) of a layer behind each token if `keeps_all`, else behind the last that counts."""
        states = self._cache.states[number]
        states.index_copy_(0, self._written_M.to(states.device), states_BN.flatten(0, 1))

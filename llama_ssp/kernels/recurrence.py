"""Linear recurrences over a state matrix of each head: the gated delta rule, and Mamba 2, which has no correction.

    state behind token t   S_t = d_t S_{t-1} + k_t w_t        w_t = v_t in Mamba 2
    output                 o_t = q_t S_t                      w_t = b_t (v_t - k_t d_t S_{t-1}) with the delta rule

Tokens of a chunk are computed together; a token with d = 1 and w = 0 leaves the state as it is. All is in fp32.

Shapes: B sequences, T tokens, H heads, N width of a key, P width of a value.

Source: Yang et al. 2024, arXiv:2412.06464 (gated delta rule); Dao and Gu 2024, arXiv:2405.21060 (Mamba 2).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 64
"""Tokens that are computed together."""


class Steps(NamedTuple):
    """The inputs of T tokens.

    Attributes:
        queries, keys: (B, H, T, N).
        values: (B, H, T, P).
        log_decays: the logarithms of d, at most 0, (B, H, T).
        rates: b of the delta rule, (B, H, T); None without one.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor
    rates: Tensor | None = None

    def part(self, tokens: slice) -> "Steps":
        """The inputs of some of the tokens."""
        return self.map(lambda part: part[:, :, tokens])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Steps":
        """The inputs with each tensor changed."""
        queries, keys, values, log_decays = map(change, (self.queries, self.keys, self.values, self.log_decays))
        return Steps(queries, keys, values, log_decays, None if self.rates is None else change(self.rates))

    def masked(self, takes_BT: Tensor) -> "Steps":
        """The same inputs, where tokens that are not to be taken leave the state as it is."""
        takes_B1T = takes_BT[:, None]
        if self.rates is None:
            values = self.values * takes_B1T[..., None]
            return self._replace(values=values, log_decays=self.log_decays * takes_B1T)
        return self._replace(rates=self.rates * takes_B1T, log_decays=self.log_decays * takes_B1T)


def recur(state_BHNP: Tensor, steps: Steps, *, keeps_all: bool) -> tuple[Tensor, Tensor]:
    """Take in tokens.

    Args:
        state_BHNP: behind the token before the first.
        steps: at least one token.
        keeps_all: whether the state behind each token is wanted, and not only that behind the last one.

    Returns:
        The outputs (B, H, T, P), and the states (B, T, H, N, P), or the last one (B, 1, H, N, P).
    """
    if keeps_all:
        return _chunk(state_BHNP, steps, keeps_all=True)
    outputs, num_tokens, states_B1HNP = [], steps.keys.shape[2], state_BHNP[:, None]
    for start in range(0, num_tokens, _CHUNK):
        part = steps.part(slice(start, start + _CHUNK))
        output, states_B1HNP = _chunk(states_B1HNP[:, 0], part, keeps_all=False)
        outputs.append(output)
    return torch.cat(outputs, 2), states_B1HNP


def _chunk(state_BHNP: Tensor, steps: Steps, *, keeps_all: bool) -> tuple[Tensor, Tensor]:
    queries, keys, added, log_decays, rates = steps
    since_start_BHT = log_decays.cumsum(-1)
    decay_BHT1 = since_start_BHT.exp()[..., None]
    # From the second token to the first.
    between_BHTT = (since_start_BHT[..., None] - since_start_BHT[..., None, :]).exp().tril()
    if rates is not None:
        held = decay_BHT1 * (keys @ state_BHNP)
        overlaps_BHTT = rates[..., None] * (keys @ keys.transpose(-1, -2)) * between_BHTT
        added = torch.linalg.solve_triangular(
            overlaps_BHTT, rates[..., None] * (added - held), upper=False, unitriangular=True
        )
    outputs = decay_BHT1 * (queries @ state_BHNP) + ((queries @ keys.transpose(-1, -2)) * between_BHTT) @ added
    if not keeps_all:
        decayed_keys = keys * between_BHTT[:, :, -1, :, None]
        last = decay_BHT1[:, :, -1:] * state_BHNP + decayed_keys.transpose(-1, -2) @ added
        return outputs, last[:, None]
    decayed_keys = keys[:, :, None] * between_BHTT[..., None]  # behind each token
    states = decay_BHT1[..., None] * state_BHNP[:, :, None] + decayed_keys.transpose(-1, -2) @ added[:, :, None]
    return outputs, states.transpose(1, 2)

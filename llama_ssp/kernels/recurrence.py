"""Linear recurrences over a state matrix of each head: the gated delta rule, and Mamba 2, which has no correction.

    state after token t    S_t = d_t S_{t-1} + k_t w_t        w_t = v_t in Mamba 2
    output                 o_t = q_t S_t                      w_t = b_t (v_t - k_t d_t S_{t-1}) with the delta rule

Tokens of a chunk are computed together; a token with d = 1 and w = 0 leaves the state as it is. All is in fp32.

`Places` and `HeadLayout` are for a kernel of GPUs, which computes all of a layer's steps for its tokens.

Shapes: B sequences, T tokens, H heads, N width of a key, P width of a value, D decays of a head: 1, or N for one of
each row of the state; C channels, R kept states, I kept inputs.

Source: Yang et al. 2024, arXiv:2412.06464 (gated delta rule); Kimi Team 2025, arXiv:2510.26692 (a decay of each row);
Dao and Gu 2024, arXiv:2405.21060 (Mamba 2).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK, _CHUNK_OF_ROWS = 64, 16
"""Tokens that are computed together, with one decay and with one of each row."""


class Steps(NamedTuple):
    """The inputs of the recurrence for T tokens; symbols and shapes are those of the module.

    Attributes:
        queries, keys: q and k, (B, H, T, N).
        values: v, (B, H, T, P).
        log_decays: the logarithms of d, at most 0, (B, H, T, D): D is 1 for a decay of the whole state, or N for one of
            each row.
        rates: b of the delta rule, (B, H, T); None for Mamba 2.
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
            return self._replace(values=values, log_decays=self.log_decays * takes_B1T[..., None])
        return self._replace(rates=self.rates * takes_B1T, log_decays=self.log_decays * takes_B1T[..., None])


class Places(NamedTuple):
    """A layer's rings of inputs (rows * I, C) and states (rows * R, H, N, P), and where a forward's rows stand in them.

    Of each row: the position of its first token, how many tokens count (None for all), and its number in the cache.
    """

    inputs: Tensor
    states: Tensor
    num_inputs: int
    num_kept: int
    first_B1: Tensor
    taken_B: Tensor | None
    rows_B: Tensor


class HeadLayout(NamedTuple):
    """Places of queries, keys and values of the first key head among the numbers of a token, and among channels.

    `steps` lead to the next key head's queries and keys, and values; among channels heads follow each other.
    """

    firsts: tuple[int, int, int]
    steps: tuple[int, int]
    channels: tuple[int, int, int]
    num_key_heads: int


def recur(state_BHNP: Tensor, steps: Steps, *, keeps_all: bool) -> tuple[Tensor, Tensor]:
    """Compute the recurrence for some tokens.

    Args:
        state_BHNP: the state before the first token.
        steps: at least one token.
        keeps_all: whether the state after each token is wanted, not only after the last one.

    Returns:
        The outputs (B, H, T, P), and the states (B, T, H, N, P), or the last one (B, 1, H, N, P).
    """
    num_tokens = steps.keys.shape[2]
    # What cuBLAS does for a solution may not be capturable, and what is captured has at most these tokens.
    solve = _substituted if steps.keys.is_cuda and num_tokens <= _CHUNK else _solved
    if keeps_all:
        return _chunk(state_BHNP, steps, solve, keeps_all=True)
    outputs, states_B1HNP = [], state_BHNP[:, None]
    chunk = _CHUNK if steps.log_decays.shape[-1] == 1 else _CHUNK_OF_ROWS
    for start in range(0, num_tokens, chunk):
        part = steps.part(slice(start, start + chunk))
        output, states_B1HNP = _chunk(states_B1HNP[:, 0], part, solve, keeps_all=False)
        outputs.append(output)
    return torch.cat(outputs, 2), states_B1HNP


def _chunk(
    state_BHNP: Tensor, steps: Steps, solve: Callable[[Tensor, Tensor], Tensor], *, keeps_all: bool
) -> tuple[Tensor, Tensor]:
    queries, keys, added, log_decays, rates = steps
    since_start_BHDT = log_decays.cumsum(2).transpose(-1, -2)
    decays_BHTD = since_start_BHDT.exp().transpose(-1, -2)
    # From the second token to the first.
    between_BHDTT = (since_start_BHDT[..., None] - since_start_BHDT[..., None, :]).exp().tril()
    between_BHTTD, is_one = between_BHDTT.movedim(2, -1), log_decays.shape[-1] == 1

    def of_state(x_BHTN: Tensor) -> Tensor:
        return decays_BHTD * (x_BHTN @ state_BHNP) if is_one else (decays_BHTD * x_BHTN) @ state_BHNP

    def of_keys(x_BHTN: Tensor) -> Tensor:
        if is_one:
            return (x_BHTN @ keys.transpose(-1, -2)) * between_BHDTT[:, :, 0]
        return (x_BHTN[:, :, :, None] * keys[:, :, None] * between_BHTTD).sum(-1)

    if rates is not None:
        overlaps_BHTT = rates[..., None] * of_keys(keys)
        wanted = rates[..., None] * (added - of_state(keys))
        added = solve(overlaps_BHTT, wanted)
    outputs = of_state(queries) + of_keys(queries) @ added
    if not keeps_all:
        decayed_keys = keys * between_BHTTD[:, :, -1]
        last = decays_BHTD[:, :, -1, :, None] * state_BHNP + decayed_keys.transpose(-1, -2) @ added
        return outputs, last[:, None]
    decayed_keys = keys[:, :, None] * between_BHTTD  # after each token
    states = decays_BHTD[..., None] * state_BHNP[:, :, None] + decayed_keys.transpose(-1, -2) @ added[:, :, None]
    return outputs, states.transpose(1, 2)


def _solved(lower_BHTT: Tensor, values_BHTP: Tensor) -> Tensor:
    """Solve (1 + L) x = v, where of L the part below the diagonal counts."""
    found_BHTP: Tensor = torch.linalg.solve_triangular(lower_BHTT, values_BHTP, upper=False, unitriangular=True)
    return found_BHTP


def _substituted(lower_BHTT: Tensor, values_BHTP: Tensor) -> Tensor:
    """Solve as `_solved`, token by token."""
    found_BHTP = values_BHTP[:, :, :1]
    for token in range(1, values_BHTP.shape[2]):
        known_BH1P = (lower_BHTT[:, :, token, :token, None] * found_BHTP).sum(2, keepdim=True)
        found_BHTP = torch.cat([found_BHTP, values_BHTP[:, :, token : token + 1] - known_BH1P], 2)
    return found_BHTP

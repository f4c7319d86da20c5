"""Uniforms that are a pure function of their key, computed by tensor operations on the batch's device.

A uniform depends only on (seed, prompt, sample index, start of the round, offset in the round, purpose), not on the
batch, the placement, a refill, a resumption, or other prompts. A prompt is its token ids and the number of equal ones
before it. There is no generator state and the host reads nothing, so a round can run on the meta device and inside a
CUDA graph. Module `processors` turns uniforms into tokens.

Method: a row's key plus a two-dimensional Weyl lattice over (start, counter) passes through the finaliser of
SplitMix64. All arithmetic is int64 with wrap-around, the same on every device.

    uniforms of a round   | draft: P K | accept: K | residual: P | plain: P |    N = 3 K + 4

Shapes: B sequences, K drafted tokens, P = 2 uniforms per draw, N uniforms per round, M rounds.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    """The low 64 bits of `bits` as int64."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


# Steps of the R2 sequence (2^64 / g and 2^64 / g^2, g the plastic number), whose multiples are spread evenly. No two
# (start, counter) of one row collide while starts are below 2^24.
_START_STEP = _signed(0xC13FA9A902A6328F)
_COUNTER_STEP = _signed(0x91E10DA5C79E7B1D)
_MIX_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_MIX_SHIFTS = (30, 27, 31)
_TOP_53_BITS = _signed(-1 << 11)
_NUM_PURPOSES, _MAX_OFFSETS = 4, 1 << 16
"""Each purpose, in the order of `Draws`, has counters of its own."""
PER_DRAW = 2
"""P: uniforms per drawn token; see `processors.draw`."""


class Draws(NamedTuple):
    """The uniforms of one round, fp64 in [0, 1), multiples of 2^-53.

    `residual_BP` draws the token after the accepted ones, resampled or bonus. `plain_BTP` are the uniforms of rounds
    without a draft that begin now and at each of the next T - 1 tokens: if drafts are certain, the target draws the
    tokens at these positions with them, so that the text is that of plain decoding. In other rounds T is 1.
    """

    draft_BKP: Tensor
    accept_BK: Tensor
    residual_BP: Tensor
    plain_BTP: Tensor


def _mix_(bits: Tensor) -> Tensor:
    """Scramble int64 bijectively, in place.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", with Stafford's variant 13.
    """
    for shift, factor in zip(_MIX_SHIFTS, (*_MIX_FACTORS, None), strict=True):
        logical_shift_mask = (1 << (64 - shift)) - 1
        bits.bitwise_xor_((bits >> shift).bitwise_and_(logical_shift_mask))
        if factor is not None:
            bits.mul_(factor)
    return bits


def prompt_key(prompt_ids: Sequence[int], *, num_equal_before: int) -> int:
    """Make the key of a prompt, int64, from its token ids and from how many equal prompts came before it."""
    content = struct.pack(f"<{len(prompt_ids) + 1}q", num_equal_before, *prompt_ids)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def row_key(*, seed: int, prompt: int, sample_index: int) -> int:
    """Make the key of a row, int64, from the low 64 bits of the seed, of a `prompt_key` and of the sample's index."""
    key = _mixed(seed)
    for number in (prompt, sample_index):
        key = _mixed(key + number * _START_STEP)
    return _signed(key)


def _mixed(bits: int) -> int:
    """`_mix_` of the low 64 bits, unsigned."""
    bits %= 1 << 64
    for shift, factor in zip(_MIX_SHIFTS, (*_MIX_FACTORS, 1), strict=True):
        bits = (bits ^ (bits >> shift)) * factor % (1 << 64)
    return bits


def exponentials(keys_B: Tensor, positions_BT: Tensor, *, vocab_size: int, first_id: int = 0) -> Tensor:
    """Return standard exponential numbers above 0, fp32 (B, T, V), one for each token at each position.

    Each is a function of key, position and token; the V tokens begin at `first_id`.
    """
    first = _NUM_PURPOSES * _MAX_OFFSETS + first_id  # after the counters of all purposes
    steps_V = torch.arange(first, first + vocab_size, device=keys_B.device)
    starts_BT = torch.add(keys_B[:, None], positions_BT, alpha=_START_STEP)
    bits_BTV = _mix_(starts_BT[..., None] + steps_V * _COUNTER_STEP).bitwise_and_(_TOP_53_BITS)
    # Exact in fp64: multiples of 2^-53 in (0, 1]. Only the logarithm of 1 is replaced, by a tiny number.
    uniforms_BTV = bits_BTV.double().mul_(-(2.0**-64)).add_(0.5)
    return uniforms_BTV.log_().neg_().clamp_min_(2.0**-60).float()


class UniformTable:
    """The uniforms of rounds with K = `num_draft_tokens` <= 32768 drafted tokens; K is 0 without a draft.

    All uniforms of a row are computed when the row is admitted; a round only looks them up.
    """

    def __init__(self, num_draft_tokens: int, device: torch.device) -> None:
        self.device = device
        self._num_draft_tokens = num_draft_tokens
        self._sizes = [PER_DRAW * num_draft_tokens, num_draft_tokens, PER_DRAW, PER_DRAW]
        self.num_uniforms = sum(self._sizes)
        counters = [
            purpose * _MAX_OFFSETS + offset for purpose, size in enumerate(self._sizes) for offset in range(size)
        ]
        self._steps_N = torch.tensor([_signed(counter * _COUNTER_STEP) for counter in counters], device=device)
        self._half = torch.tensor(0.5, dtype=torch.float64, device=device)

    def uniforms(self, keys: Tensor, starts: Tensor) -> Tensor:
        """Compute all uniforms (..., N), fp64, of the rounds that begin at `starts`: int64, each row's length then.

        The keys, from `row_key`, have any shape that broadcasts with `starts`.
        """
        bits = torch.add(keys, starts, alpha=_START_STEP)[..., None] + self._steps_N
        _mix_(bits).bitwise_and_(_TOP_53_BITS)
        # Signed 53-bit fractions of 2^64 plus one half: exact in fp64, and always below 1.
        return torch.add(self._half, bits, alpha=2.0**-64)

    def split(self, uniforms_BN: Tensor, num_draft_tokens: int | None = None) -> Draws:
        """Split the uniforms of one round by purpose, as views; a round with fewer tokens uses the first of them."""
        num = self._num_draft_tokens
        draft_BX, accept_BK, residual_BP, plain_BP = uniforms_BN.split_with_sizes(self._sizes, dim=1)
        draft_BKP = draft_BX.unflatten(1, (num, PER_DRAW))
        if num_draft_tokens not in {None, num}:
            draft_BKP, accept_BK = draft_BKP[:, :num_draft_tokens], accept_BK[:, :num_draft_tokens]
        return Draws(draft_BKP, accept_BK, residual_BP, plain_BP[:, None])

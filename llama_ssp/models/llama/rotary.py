"""Norms, and what happens to heads before attention: their norms, the rotary embedding, and the write to the cache.

One complex product turns queries and keys, unless compiled attention does all of this on a CPU (`native.attention`), or
on a GPU a kernel of ours, which also norms heads and writes to the cache.

Shapes: B sequences, T positions, M = B * T tokens, X heads, S slots, H query heads, D head dim, P = D / 2 pairs of
dimensions, E width of what is normalized.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.models.cache import BufferOf, CacheView, Workspace
from llama_ssp.models.varlen import Heads


class RmsNorm:
    """The root-mean-square norm over the last dimension.

    torch has one operator for it on a GPU only. In fp32 on the CPU, where each small operator costs as much as the
    arithmetic, the vector's length is used: x / sqrt(mean(x^2) + eps) = sqrt(E) x / hypot(|x|, sqrt(E eps)).

    Attributes:
        weight_E: with `by_length` times sqrt(E).
        least_square: E eps.
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - each family has its own class
        weight_E: Tensor = module.weight.detach()
        width = weight_E.shape[0]
        self.eps: float = module.variance_epsilon
        self.by_length = weight_E.device.type == "cpu" and weight_E.dtype == torch.float32
        self.weight_E = weight_E * width**0.5 if self.by_length else weight_E
        self.least_square = width * self.eps
        self._least_length = weight_E.new_tensor(self.least_square**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x (..., E)."""
        if not self.by_length:
            return functional.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least_length)
        return (x / lengths).mul_(self.weight_E)


class PlaceHeads(Protocol):
    """Norms and turns queries and keys, and writes keys and values to the cache."""

    def __call__(
        self, qkv_MXD: Tensor, number: int, heads: Heads, norms: Sequence[RmsNorm]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Place what layer `number` computed; returns queries (M, H, D), and keys and values as `LayerBuffer` has them.

        `norms` are those of query and key heads, in models that have them.
        """


class Rotations(Workspace):
    """The complex rotary factors of all positions."""

    def __init__(self, rotary: Any, *, capacity: int, device: torch.device) -> None:  # noqa: ANN401
        angles_SP = torch.arange(capacity, device=device)[:, None] * rotary.inv_freq.float()
        self.freqs_cis_S1P = torch.polar(torch.full_like(angles_SP, rotary.attention_scaling), angles_SP)[:, None]


class PlaceByOperators(NamedTuple):
    """A `PlaceHeads` of torch's operators.

    Attributes:
        freqs_cis_M1P: each token's rotary factors.
        view: of the cache.
    """

    freqs_cis_M1P: Tensor
    view: CacheView

    def __call__(
        self, qkv_MXD: Tensor, number: int, heads: Heads, norms: Sequence[RmsNorm]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PlaceHeads`."""
        num_heads, num_kv_heads, _, _ = heads
        if norms:
            norm_heads(qkv_MXD, heads, norms)
        qkv_MXD = _turned(qkv_MXD, self.freqs_cis_M1P, num_heads + num_kv_heads)
        keys, values = self.view.update(qkv_MXD.narrow(1, num_heads, 2 * num_kv_heads), number)
        return qkv_MXD.narrow(1, 0, num_heads), keys, values


def norm_heads(qkv_MXD: Tensor, heads: Heads, norms: Sequence[RmsNorm]) -> None:
    """Norm queries and keys in place."""
    turned_MXD = qkv_MXD.narrow(1, 0, heads.num + heads.num_kv)
    for norm, part in zip(norms, turned_MXD.split([heads.num, heads.num_kv], 1), strict=True):
        part.copy_(norm(part))


RotateWrite = Callable[..., None]
"""`kernels.rotate_write`."""


class PlaceByKernel(NamedTuple):
    """A `PlaceHeads` of one kernel.

    Attributes:
        rotate_write: the kernel.
        freqs_cis_S1P: the rotary factors of all positions.
        positions_BT: of the tokens, contiguous.
        slots_M: of the tokens, among the slots of all rows; None if row b is row b of the cache.
        buffer: gives a layer's part of the cache.
        cache_rows_B: see `CacheView`.
    """

    rotate_write: RotateWrite
    freqs_cis_S1P: Tensor
    positions_BT: Tensor
    slots_M: Tensor | None
    buffer: BufferOf
    cache_rows_B: Tensor | None = None

    def __call__(
        self, qkv_MXD: Tensor, number: int, heads: Heads, norms: Sequence[RmsNorm]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PlaceHeads`."""
        buffer = self.buffer(number, lambda: qkv_MXD.narrow(1, heads.num, 2 * heads.num_kv))
        turns_SP2 = torch.view_as_real(self.freqs_cis_S1P)
        self.rotate_write(
            qkv_MXD, turns_SP2, self.positions_BT, buffer.parts, num_heads=heads.num, slots_M=self.slots_M,
            norms=[norm.weight_E for norm in norms], eps=norms[0].eps if norms else 0.0,
        )  # fmt: skip
        return qkv_MXD.narrow(1, 0, heads.num), *buffer.rows(self.cache_rows_B)


def _turned(heads_MXD: Tensor, freqs_cis_M1P: Tensor, num_turned: int) -> Tensor:
    """Rotate adjacent pairs of dimensions of the first heads, in fp32 and in place."""
    first_MXD = heads_MXD.narrow(1, 0, num_turned)
    in_fp32 = first_MXD.float()
    torch.view_as_complex(in_fp32.unflatten(-1, (-1, 2))).mul_(freqs_cis_M1P)
    if in_fp32 is not first_MXD:
        first_MXD.copy_(in_fp32)
    return heads_MXD

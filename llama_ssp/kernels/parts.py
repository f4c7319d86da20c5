"""Parts of a layer as references and kernels take them: heads, sequences of a forward, the norm, rows of a cache.

A row of a cache is the key or the value of a head, as a format of `storage.formats` keeps it:

    no scale   | D numbers |
    a scale    | D numbers of a byte | 4 bytes: the fp32 number that they are multiplied by |

It depends on its own numbers alone. `KeptRows` is the reference; operators of devices read rows as they are.

Shapes: H query heads, N key-value heads, D head dim, C sequences, E width of what is normalized, W width of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.storage.formats import CACHES, WORD_BYTES


class Heads(NamedTuple):
    """The heads of a layer on this rank: H, N, D, and what scores are multiplied by."""

    num: int
    num_kv: int
    dim: int
    scale: float


class Sequences(NamedTuple):
    """Places of the sequences of a forward; tensors are int32 on the device.

    Attributes:
        first_query_C1: the running sum of the sequences' numbers of queries.
        first_slot_C1: the slots where their rows begin, and one more number, which has no effect.
        used_C: for each sequence, the number of slots up to the last query's own.
        most_queries: the most queries of a sequence.
        most_slots: the most slots of a row.
    """

    first_query_C1: Tensor
    first_slot_C1: Tensor
    used_C: Tensor
    most_queries: int
    most_slots: int


def left_of(window: int | None) -> int:
    """The keys to the left of its own that a query sees, -1 for all, if it sees `window` with its own."""
    return -1 if window is None else window - 1


class RmsNorm:
    """The root-mean-square norm over the last dimension; operators of devices compute it with its neighbours.

    torch has one operator for it on a GPU only. On the CPU, where each small operator costs as much as the arithmetic,
    the vector's length is used, in fp32: x / sqrt(mean(x^2) + eps) = sqrt(E) x / hypot(|x|, sqrt(E eps)).

    Attributes:
        weight_E: with `by_length` in fp32, times sqrt(E).
        least_square: E eps.
    """

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        weight_E, width, self.eps = weight_E.detach(), weight_E.shape[0], eps
        self.by_length = weight_E.device.type == "cpu"
        self.weight_E = weight_E.float() * width**0.5 if self.by_length else weight_E
        self.least_square = width * self.eps
        self._least_length = self.weight_E.new_tensor(self.least_square**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x (..., E)."""
        if not self.by_length:
            return functional.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
        in_fp32 = x.float()
        lengths: Tensor = torch.linalg.vector_norm(in_fp32, dim=-1, keepdim=True).hypot_(self._least_length)
        return (in_fp32 / lengths).mul_(self.weight_E).to(x.dtype)


class KeptRows(NamedTuple):
    """Format of kept rows.

    Attributes:
        dtype: dtype of a number.
        largest: the value to which the largest number of a row is scaled; None without a scale.
    """

    dtype: torch.dtype
    largest: float | None = None

    @property
    def kind(self) -> str:
        """The name of the numbers' dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of a tensor of rows."""
        return torch.uint8 if self.largest else self.dtype

    def width(self, head_dim: int) -> int:
        """W, in elements of `stored_dtype`."""
        return head_dim + (WORD_BYTES if self.largest else 0)

    def pack(self, x: Tensor) -> Tensor:
        """Rows (..., W) of numbers (..., D); 8 bits are rounded to the nearest, ties to even."""
        if self.largest is None:
            return x.to(self.dtype)
        x = x.float()
        most = x.abs().amax(-1, keepdim=True)
        factor = torch.full_like(most, self.largest).div_(most)  # a number over a tensor would be rounded twice
        steps = x * factor.masked_fill_(most == 0, 0.0)
        codes = steps.to(self.dtype) if self.dtype.is_floating_point else steps.round_().to(self.dtype)
        return torch.cat([codes.view(torch.uint8), (most / self.largest).view(torch.uint8)], -1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers (..., D) of rows (..., W), in `dtype`."""
        if self.largest is None:
            return rows.to(dtype)
        codes, scales = rows[..., :-WORD_BYTES].view(self.dtype), rows[..., -WORD_BYTES:]
        if any(place % WORD_BYTES for place in (scales.storage_offset(), *scales.stride()[:-1])):
            scales = scales.contiguous()  # of widths between which words do not lie at multiples of their size
        return codes.float().mul_(scales.view(torch.float32)).to(dtype)


SINGLES = KeptRows(torch.float32)


def rows_of(cache_dtype: str, dtype: torch.dtype) -> KeptRows:
    """The rows of a format, by its name, for a model that computes in `dtype`."""
    record = CACHES.of(cache_dtype)
    return KeptRows(getattr(torch, record.dtype) if record.dtype else dtype, record.largest)

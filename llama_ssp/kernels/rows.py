"""Rows of a cache: the key or the value of a head, as a format of `storage.formats` keeps it.

    no scale   | D numbers |
    a scale    | D numbers of a byte | 4 bytes: the fp32 number that they are multiplied by |

A row depends on its own numbers alone. `pack` and `unpack` are the reference; `cpu.attention` and `attention_gpu` read
rows as they are.

Shapes: D head dim, W width of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.storage.formats import CACHES, WORD_BYTES


class KeptRows(NamedTuple):
    """How rows are kept.

    Attributes:
        dtype: of a number.
        largest: what the largest number of a row becomes; None without a scale.
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
        codes, scales = rows[..., :-WORD_BYTES].view(self.dtype), rows[..., -WORD_BYTES:].view(torch.float32)
        return codes.float().mul_(scales).to(dtype)


SINGLES = KeptRows(torch.float32)


def rows_of(cache_dtype: str, dtype: torch.dtype) -> KeptRows:
    """The rows of a format, by its name, for a model that computes in `dtype`."""
    record = CACHES.of(cache_dtype)
    return KeptRows(getattr(torch, record.dtype) if record.dtype else dtype, record.largest)

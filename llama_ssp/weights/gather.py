"""A large matrix as one gather of a small one; any slice can be made without the rest.

    large[r, c] = scale * small[rows[r], columns[c]] * weights[c]        0 if an index is SPARE

Module `expansion` computes the indices. Shapes: O rows and I columns of the large matrix; a norm is a single row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

SPARE = -1


@dataclass(frozen=True, kw_only=True)
class Gather:
    """How a large matrix is made from a small one.

    Attributes:
        source: name of the small tensor.
        rows_O, columns_I: indices of the small row and column; SPARE for none.
        weights_I: factor of each column, a signed power of two, or 0; None for 1.
        scale: factor of all numbers.
        last_column: its value in rows with an index, and in spare rows; None does not set it.
    """

    source: str
    rows_O: Tensor
    columns_I: Tensor
    weights_I: Tensor | None = None
    scale: float = 1.0
    last_column: tuple[float, float] | None = None

    def cut(self, dim: int, parts: Sequence[range]) -> "Gather":
        """Keep some of the rows (dim 0) or of the columns (dim 1), in the order of `parts`."""
        if dim == 0:
            return replace(self, rows_O=_kept(self.rows_O, parts))
        assert self.last_column is None, "matrices with a last column are cut by rows"
        weights_I = None if self.weights_I is None else _kept(self.weights_I, parts)
        return replace(self, columns_I=_kept(self.columns_I, parts), weights_I=weights_I)

    def make(self, small: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Make the matrix, on the device of the small one.

        Memory: the result, and its distinct rows once. The small numbers are rounded to `dtype` before they are copied,
        so that all copies of a number are equal.
        """
        device = small.device
        distinct, rows_O = self.rows_O.unique(return_inverse=True)
        padded = functional.pad(small * self.scale, (0, 1, 0, 1)).to(dtype)  # zeros at index SPARE
        spread = padded[distinct.to(device)].index_select(1, self.columns_I.remainder(padded.shape[1]).to(device))
        if self.weights_I is not None:
            spread.mul_(self.weights_I.to(device, dtype))
        if self.last_column is not None:
            taken, spare = self.last_column
            spread[:, -1] = torch.where(distinct == SPARE, spare, taken).to(device, dtype)
        return spread.index_select(0, rows_O.to(device))


def _kept(values: Tensor, parts: Sequence[range]) -> Tensor:
    return torch.cat([values[part.start : part.stop] for part in parts])

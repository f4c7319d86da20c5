"""Matrices that are stored the other way round: inputs first.

Shapes: X experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from llama_ssp.weights.source import ListedTensor, Wanted


@dataclass(frozen=True, kw_only=True)
class TurnedTensor(ListedTensor):
    """A matrix, or the matrices of all experts, whose inputs and outputs are stored the other way round."""

    stored: ListedTensor

    @classmethod
    def of(cls, stored: ListedTensor) -> "TurnedTensor":
        """Turn a tensor (inputs, outputs), or (X, inputs, outputs)."""
        *number, inputs, outputs = stored.shape
        return cls(dtype=stored.dtype, shape=(*number, outputs, inputs), stored=stored)

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `ListedTensor.read`."""
        dim, num_dims = wanted.get("dim"), len(self.shape)
        if dim is not None and dim >= num_dims - 2:
            wanted["dim"] = 2 * num_dims - 3 - dim
        return self.stored.read(**wanted).transpose(-1, -2).contiguous()


def turn(tensors: Mapping[str, ListedTensor], ends: tuple[str, ...]) -> dict[str, ListedTensor]:
    """Turn the matrices whose names end so."""
    return {
        name: TurnedTensor.of(tensor) if name.endswith(ends) and len(tensor.shape) == 2 else tensor
        for name, tensor in tensors.items()
    }

"""Experts in MXFP4, as gpt-oss stores them, read as numbers in 16 bits, which hold them.

    experts.NAME_blocks    (X, O, I / 32, 16), two codes a byte, the first in its low half
    experts.NAME_scales    (X, O, I / 32), the exponent of two of each 32 codes, plus 127
    experts.NAME           (X, I, O), which modules hold

Shapes: X experts, O outputs, I inputs, G groups of 32 inputs.

Source: Rouhani et al. 2023, arXiv:2310.10537; OCP Microscaling Formats, version 1.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from llama_ssp.settings.stored import PackedLayout
from llama_ssp.weights.source import StoredTensor, TensorFacts, Wanted

_GROUP, _BIAS = 32, 127
_NUMBERS = torch.tensor([sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


@dataclass(frozen=True, kw_only=True)
class WidenedTensor(TensorFacts):
    """The weights of all experts, (X, I, O)."""

    blocks: StoredTensor
    scales: StoredTensor

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`."""
        parts: list[list[range]] = [[range(size)] for size in self.shape]
        if (dim := wanted.get("dim")) is not None:
            parts[dim] = [*wanted["parts"]]
        dtype, (experts, inputs, outputs) = wanted.get("dtype") or self.dtype, parts
        whole = [
            torch.cat([weight_IO[part.start : part.stop] for part in inputs])
            for each in experts
            for number in each
            for weight_IO in [torch.cat([self._of_expert(number, part).to(dtype) for part in outputs]).t()]
        ]
        return torch.stack(whole).to(wanted.get("device"))

    def _of_expert(self, number: int, outputs: range) -> Tensor:
        """Some outputs of an expert, (O, I) in fp32."""
        expert = range(number, number + 1)
        bytes_OGB = self.blocks.read(expert, outputs)[0]
        numbers_OGI = _NUMBERS[torch.stack([bytes_OGB & 15, bytes_OGB >> 4], dim=-1).flatten(2).int()]
        exponents_OG = self.scales.read(expert, outputs)[0].int() - _BIAS
        return numbers_OGI.ldexp_(exponents_OG[..., None]).flatten(1)


def widened(tensors: Mapping[str, StoredTensor], layout: PackedLayout) -> dict[str, WidenedTensor | None]:
    """The numbers of experts by name; None for those whose blocks and scales do not fit each other."""
    names = [name.removesuffix(layout.weight) for name in tensors if name.endswith(layout.weight)]
    return {name: _widened(tensors[name + layout.weight], tensors.get(name + layout.scale)) for name in names}


def _widened(blocks: StoredTensor, scales: StoredTensor | None) -> WidenedTensor | None:
    match blocks.shape:
        case (num_experts, num_outputs, num_groups, num_bytes) if num_bytes * 2 == _GROUP and scales:
            fits = (blocks.kind, scales.kind, scales.shape) == ("U8", "U8", blocks.shape[:3])
            shape = num_experts, num_groups * _GROUP, num_outputs
            return WidenedTensor(dtype=torch.bfloat16, shape=shape, blocks=blocks, scales=scales) if fits else None
        case _:
            return None

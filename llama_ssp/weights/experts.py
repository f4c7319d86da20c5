"""Experts that are stored one by one: the matrices of a layer's experts become two tensors, as modules hold them.

    stored      experts.N.gate_proj.weight (I, E), experts.N.up_proj.weight (I, E), experts.N.down_proj.weight (E, I)
                or w1, w3 and w2 in the same order
    joined      experts.gate_up_proj (X, 2 I, E), experts.down_proj (X, E, I)

Shapes: X experts, I inputs of an expert's last matrix, E the model's width.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.weights.packed import PackedTensor
from llama_ssp.weights.source import StoredTensor, TensorFacts, Wanted

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d{1,6})\.(?P<matrix>\w+)\.weight")
_JOINED = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0)),
}


@dataclass(frozen=True, kw_only=True)
class JoinedTensor(TensorFacts):
    """A tensor of all experts; `stored` has the matrices of each, which stand one below the other."""

    stored: tuple[tuple[StoredTensor, ...], ...]

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`; parts are of the outputs (dim 1) or of the inputs (dim 2) of every expert."""
        num_rows = self.stored[0][0].shape[0]
        outputs, inputs = ([range(size)] for size in self.shape[1:])
        if wanted.get("dim") == 1:
            outputs = [*wanted["parts"]]
        elif wanted.get("dim") is not None:
            inputs = [*wanted["parts"]]
        sizes = len(self.stored), sum(map(len, outputs)), sum(map(len, inputs))
        joined = torch.empty(sizes, dtype=wanted.get("dtype") or self.dtype)
        for rows_OI, stored in zip(joined, self.stored, strict=True):
            start = 0
            for part in outputs:
                for number, matrix in enumerate(stored):
                    first = max(part.start - number * num_rows, 0)
                    end = min(part.stop - number * num_rows, num_rows)
                    if first < end:
                        columns = rows_OI[start : start + end - first].split([len(each) for each in inputs], dim=1)
                        for into, each in zip(columns, inputs, strict=True):
                            into.copy_(matrix.read(range(first, end), each))
                        start += end - first
        return joined.to(wanted.get("device"))


def join_experts(
    tensors: Mapping[str, StoredTensor | PackedTensor], folder: Path
) -> dict[str, "StoredTensor | PackedTensor | JoinedTensor"]:
    """Replace the matrices of experts by joined tensors; CheckpointError for experts that do not fit each other."""
    found: dict[str, dict[int, dict[int, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    others: dict[str, StoredTensor | PackedTensor | JoinedTensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match and match["matrix"] in _JOINED and isinstance(tensor, StoredTensor) and len(tensor.shape) == 2:  # noqa: PLR2004 - a matrix
            joined, place = _JOINED[match["matrix"]]
            found[f"{match['experts']}.{joined}"][int(match["number"])][place] = tensor
        else:
            others[name] = tensor
    return others | {name: _joined(name, experts, folder) for name, experts in found.items()}


def _joined(name: str, experts: Mapping[int, Mapping[int, StoredTensor]], folder: Path) -> JoinedTensor:
    num_matrices = 1 + name.endswith("gate_up_proj")
    stored = [tuple(experts.get(number, {}).get(place) for place in range(num_matrices)) for number in sorted(experts)]
    first = next(iter(experts[min(experts)].values()))
    alike: Sequence[tuple[StoredTensor, ...]] = [
        tuple(each for each in matrices if each and (each.shape, each.dtype) == (first.shape, first.dtype))
        for matrices in stored
    ]
    if sorted(experts) != [*range(len(experts))] or any(len(matrices) < num_matrices for matrices in alike):
        raise CheckpointError(
            f"{folder} lacks matrices of {name}, or has some of another shape: copy or download it again"
        )
    rows, columns = first.shape
    return JoinedTensor(dtype=first.dtype, shape=(len(alike), num_matrices * rows, columns), stored=(*alike,))

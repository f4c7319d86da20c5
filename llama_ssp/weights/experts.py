"""Tensors that are stored in parts: the matrices of a layer's experts become two tensors, as modules hold them.

    stored      experts.N.gate_proj.weight (I, E), experts.N.up_proj.weight (I, E), experts.N.down_proj.weight (E, I)
                or w1, w3 and w2 in the same order
    joined      experts.gate_up_proj (X, 2 I, E), experts.down_proj (X, E, I)
    stored      q_conv1d.weight (C, 1, W), k_conv1d.weight, v_conv1d.weight
    joined      conv1d.weight (3 C, 1, W)

Shapes: X experts, I inputs of an expert's last matrix, E the model's width, C channels, W width of a convolution.
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
    """A tensor of all experts; `stored` has the matrices of each, which stand one below the other.

    Packed matrices are joined as their `byte_rows`.
    """

    stored: tuple[tuple[StoredTensor | PackedTensor, ...], ...]

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`; parts are of the experts, of their outputs (dim 1) or of their inputs (dim 2)."""
        dim, dtype = wanted.get("dim"), wanted.get("dtype") or self.dtype
        num_rows = self.stored[0][0].shape[0]
        wholes = [[range(size)] for size in self.shape]
        chosen, outputs, inputs = ([*wanted["parts"]] if dim == place else wholes[place] for place in (0, 1, 2))
        experts = []
        for matrices in (self.stored[number] for part in chosen for number in part):
            rows = []
            for part in outputs:
                for number, matrix in enumerate(matrices):
                    first, end = max(part.start - number * num_rows, 0), min(part.stop - number * num_rows, num_rows)
                    if first < end:
                        rows.append(_read(matrix, range(first, end), inputs))
            joined = torch.cat(rows)
            experts.append(joined if self.storage else joined.to(dtype))
        return torch.stack(experts).to(wanted.get("device"))


@dataclass(frozen=True, kw_only=True)
class JoinedConvolution(TensorFacts):
    """The weights of a convolution whose channels are `stored` in parts."""

    stored: tuple["Listed", ...]

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `WeightSource.read`; parts are of the channels."""
        whole_C1W = torch.cat([part.read() for part in self.stored])
        if wanted.get("dim") is not None:
            whole_C1W = torch.cat([whole_C1W[part.start : part.stop] for part in wanted["parts"]])
        return whole_C1W.to(wanted.get("device"), wanted.get("dtype") or self.dtype)


Listed = StoredTensor | PackedTensor | JoinedTensor | JoinedConvolution
"""A tensor of a checkpoint."""


def join_convolutions(tensors: Mapping[str, Listed]) -> dict[str, Listed]:
    """Replace convolutions of queries, keys and values that are stored one by one."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        if all(part in found for part in names):
            parts = tuple(found.pop(part) for part in names)
            sizes = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
            found[name.replace(".q_conv1d.", ".conv1d.")] = JoinedConvolution(
                dtype=parts[0].dtype, shape=sizes, stored=parts
            )
    return found


def _read(matrix: StoredTensor | PackedTensor, outputs: range, inputs: Sequence[range]) -> Tensor:
    """Some outputs of a matrix, or some of its inputs."""
    if isinstance(matrix, StoredTensor):
        return torch.cat([matrix.read(outputs, part) for part in inputs], dim=1)
    if len(outputs) < matrix.shape[0]:
        return matrix.read(dim=0, parts=[outputs])
    return matrix.read(dim=1, parts=inputs)


def join_experts(
    tensors: Mapping[str, StoredTensor | PackedTensor], folder: Path
) -> dict[str, StoredTensor | PackedTensor | JoinedTensor]:
    """Replace the matrices of experts by joined tensors; CheckpointError for experts that do not fit each other."""
    found: dict[str, dict[int, dict[int, StoredTensor | PackedTensor]]] = defaultdict(lambda: defaultdict(dict))
    others: dict[str, StoredTensor | PackedTensor | JoinedTensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        is_matrix = len(tensor.shape) == 2  # noqa: PLR2004
        if match and match["matrix"] in _JOINED and is_matrix:
            joined, place = _JOINED[match["matrix"]]
            found[f"{match['experts']}.{joined}"][int(match["number"])][place] = tensor
        else:
            others[name] = tensor
    without_gates = {name for name, experts in found.items() if not any(0 in matrices for matrices in experts.values())}
    for name in without_gates:
        ups = {number: {0: matrices[1]} for number, matrices in found.pop(name).items()}
        found[name.replace("gate_up_proj", "up_proj")] = defaultdict(dict, ups)
    return others | {name: _joined(name, experts, folder) for name, experts in found.items()}


def _joined(name: str, experts: Mapping[int, Mapping[int, StoredTensor | PackedTensor]], folder: Path) -> JoinedTensor:
    num_matrices = 1 + name.endswith("gate_up_proj")
    first = next(iter(experts[min(experts)].values()))
    facts = first.shape, first.dtype, first.storage
    alike = tuple(
        tuple(matrix for place in range(num_matrices) if (matrix := experts[number].get(place))
              and (matrix.shape, matrix.dtype, matrix.storage) == facts)
        for number in sorted(experts)
    )  # fmt: skip
    if sorted(experts) != [*range(len(experts))] or any(len(matrices) < num_matrices for matrices in alike):
        raise CheckpointError(
            f"{folder} lacks matrices of {name}, or has some of another shape: copy or download it again"
        )
    rows, columns = first.shape
    return JoinedTensor(
        dtype=first.dtype, shape=(len(alike), num_matrices * rows, columns), storage=first.storage, group=first.group,
        stored=alike,
    )  # fmt: skip

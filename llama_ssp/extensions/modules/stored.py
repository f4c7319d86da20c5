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
from llama_ssp.weights.source import ListedTensor, Wanted

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d{1,6})\.(?P<matrix>\w+)\.weight")
_PLACES = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0)),
}


@dataclass(frozen=True, kw_only=True)
class JoinedTensor(ListedTensor):
    """A tensor of all experts; `stored` has the matrices of each, one below the other; packed ones as `byte_rows`."""

    stored: tuple[tuple[ListedTensor, ...], ...]

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `ListedTensor.read`; parts are of the experts, of their outputs (dim 1) or of their inputs (dim 2)."""
        chosen = wanted["parts"] if wanted.get("dim") == 0 else [range(len(self.stored))]
        experts = [self.stored[number] for part in chosen for number in part]
        pieces = [piece for matrices in experts for piece in self._pieces(matrices, wanted)]
        joined: Tensor = torch.cat(pieces).unflatten(0, (len(experts), -1))
        return joined.to(wanted.get("device"))

    def _pieces(self, matrices: Sequence[ListedTensor], wanted: Wanted) -> list[Tensor]:
        """The wanted parts of an expert, which stand one below the other."""
        dim, dtype, num_rows = wanted.get("dim"), wanted.get("dtype"), matrices[0].shape[0]
        if dim == 1:
            return [
                matrix.read(dim=0, parts=[own], dtype=dtype)
                for part in wanted["parts"]
                for start, matrix in zip(range(0, self.shape[1], num_rows), matrices, strict=True)
                if (own := range(max(part.start - start, 0), min(part.stop - start, num_rows)))
            ]
        if dim:  # inputs
            return [matrix.read(dim=1, parts=wanted["parts"], dtype=dtype) for matrix in matrices]
        return [matrix.read(dtype=dtype) for matrix in matrices]


@dataclass(frozen=True, kw_only=True)
class JoinedConvolution(ListedTensor):
    """The weights of a convolution whose channels are `stored` in parts."""

    stored: tuple[ListedTensor, ...]

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `ListedTensor.read`; parts are of the channels."""
        whole_C1W = torch.cat([part.read() for part in self.stored])
        if wanted.get("dim") is not None:
            whole_C1W = torch.cat([whole_C1W[part.start : part.stop] for part in wanted["parts"]])
        return whole_C1W.to(wanted.get("device"), wanted.get("dtype") or self.dtype)


def join(tensors: Mapping[str, ListedTensor], folder: Path) -> dict[str, ListedTensor]:
    """Join experts and convolutions; CheckpointError for experts that do not fit each other."""
    return _join_convolutions(_join_experts(tensors, folder))


def _join_convolutions(tensors: Mapping[str, ListedTensor]) -> dict[str, ListedTensor]:
    """Replace convolutions of queries, keys and values that are stored one by one."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        if all(part in found for part in names):
            parts = tuple(found.pop(part) for part in names)
            found[name.replace(".q_conv1d.", ".conv1d.")] = JoinedConvolution(
                dtype=parts[0].dtype, shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]), stored=parts
            )
    return found


def _join_experts(tensors: Mapping[str, ListedTensor], folder: Path) -> dict[str, ListedTensor]:
    """Replace the matrices of experts by joined tensors."""
    found: dict[str, dict[int, dict[int, ListedTensor]]] = defaultdict(lambda: defaultdict(dict))
    others: dict[str, ListedTensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match and match["matrix"] in _PLACES and len(tensor.shape) == 2:
            joined, place = _PLACES[match["matrix"]]
            found[f"{match['experts']}.{joined}"][int(match["number"])][place] = tensor
        else:
            others[name] = tensor
    for name, experts in found.items():
        if any(0 in matrices for matrices in experts.values()):
            others[name] = _joined(name, experts, range(1 + name.endswith("gate_up_proj")), folder)
        else:
            name_of_ups = name.replace("gate_up_proj", "up_proj")
            others[name_of_ups] = _joined(name_of_ups, experts, range(1, 2), folder)
    return others


def _joined(name: str, experts: Mapping[int, Mapping[int, ListedTensor]], places: range, folder: Path) -> JoinedTensor:
    first = next(iter(experts[min(experts)].values()))
    facts = first.shape, first.dtype, first.storage
    alike = tuple(
        tuple(
            matrix
            for place in places
            if (matrix := experts[number].get(place)) and (matrix.shape, matrix.dtype, matrix.storage) == facts
        )
        for number in sorted(experts)
    )
    if sorted(experts) != [*range(len(experts))] or any(len(matrices) < len(places) for matrices in alike):
        raise CheckpointError(
            f"{folder} lacks matrices of {name}, or has some of another shape: copy or download it again"
        )
    rows, columns = first.shape
    return JoinedTensor(
        dtype=first.dtype,
        shape=(len(alike), len(places) * rows, columns),
        storage=first.storage,
        group=first.group,
        stored=alike,
    )

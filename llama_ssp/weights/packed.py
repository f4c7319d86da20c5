"""Weights that checkpoints store quantized; a layer's tensors become one weight that is read as `byte_rows`.

    compressed-tensors   weight_packed (O, I / 8), weight_scale (O, G), weight_zero_point (O / 8, G) unless symmetric,
                         weight_g_idx (I,) if inputs are sorted
    GPTQ                 qweight (I / 8, O), scales (G, O), qzeros (G, O / 8), g_idx (I,); of 8 bits / 4 in place of 8
    AWQ                  qweight (I, O / 8), scales (G, O), qzeros (G, O / 8)
    int8, FP8            weight (O, I) or, of int8, weight_packed (O, I / 4); weight_scale per output, matrix or block,
                         which some files with FP8 call weight_scale_inv
    bitsandbytes         weight (O, I) in int8, SCB (O,), 127 times the scales; of 4 bits see `float4_files`
    MXFP4, NVFP4         weight_packed (O, I / 2), weight_scale (O, S), of NVFP4 weight_global_scale (), which divides
    NVFP4 of modelopt    weight (O, I / 2), weight_scale (O, S), weight_scale_2 (), which multiplies
    mxfp4 of gpt-oss     NAME_blocks (X, O, S, 16), NAME_scales (X, O, S) of the tensor NAME (X, I, O) of all experts

Eight codes are an int32, the first in the lowest bits; AWQ's order of outputs is 0, 2, 4, 6, 1, 3, 5, 7. A code
without a zero has the zero 8; version 1 of GPTQ stores zeros that are 1 too small. Packed int8 weights are bytes that
are 128 too large. GPTQ and compressed-tensors may sort the inputs by importance (desc_act, actorder), which scatters
the groups, so that they are read in the order of `byte_rows`. A static actorder, or weight, keeps them in place.

Floats of 4 bits are two a byte, the first in its low half.

Shapes: X experts, O outputs, I inputs, G groups of inputs, S groups of 32 inputs, or of 16.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, Unpack

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.storage.formats import PackedLayout, format_of
from llama_ssp.weights.source import ListedTensor, StoredTensor, Wanted, read_small

_SHAPE = "weight_shape"
"""The tensor of the sizes of a weight in files of compressed-tensors."""
Facts = tuple[torch.dtype, tuple[int, ...]]
"""The dtype of a weight's scales, and its shape."""


@dataclass(frozen=True, kw_only=True)
class PackedTensor(ListedTensor):
    """The weight of a layer, or of all experts, whose `parts` are stored tensors by the last part of their names.

    The record of a storage format names the subclass that reads it.
    """

    layout: PackedLayout
    parts: Mapping[str, StoredTensor]

    @classmethod
    def of_parts(cls, parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Self | None:
        """The weight of a module; None if its parts do not fit each other."""
        facts = cls._facts(parts, layout)
        if facts is None:
            return None
        return cls(
            dtype=facts[0], shape=facts[1], storage=layout.storage, group=layout.slice_group, layout=layout, parts=parts
        )

    @staticmethod
    @abstractmethod
    def _facts(parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None: ...

    @abstractmethod
    def _rows(self, outputs: range, inputs: range) -> Tensor:
        """Rows of some outputs, of some inputs in whole groups."""

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """Read rows, in the form of `byte_rows`, of all outputs, of some outputs (dim 0), or of some inputs (dim 1).

        A range of inputs must have whole groups. Raises CheckpointError if a file has changed, or if its groups are not
        as the layout describes them.
        """
        dim = wanted.get("dim")
        if len(self.shape) == 3:
            chosen = wanted["parts"] if dim == 0 else [range(self.shape[0])]
            part_of_each: Wanted = {"dim": dim % 2, "parts": wanted["parts"]} if dim else {}
            experts = [self._expert(number).read(**part_of_each) for part in chosen for number in part]
            return torch.stack(experts).to(wanted.get("device"))
        outputs, inputs = (range(size) for size in self.shape)
        if dim == 1:
            (part,) = wanted["parts"]
            rows = self._rows(outputs, part)
        else:
            parts = wanted["parts"] if dim == 0 else [outputs]
            pieces = [self._rows(part, inputs) for part in parts]
            rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return rows.to(wanted.get("device"))

    def _expert(self, number: int) -> "PackedTensor":
        parts = {leaf: replace(part, number=number, shape=part.shape[1:]) for leaf, part in self.parts.items()}
        return replace(self, shape=self.shape[:0:-1], parts=parts)


def combine(tensors: Mapping[str, ListedTensor], layout: PackedLayout, folder: Path) -> Mapping[str, ListedTensor]:
    """Replace the parts of each quantized weight by the weight; CheckpointError if they do not fit each other."""
    if any(name.endswith(f".{layout.scale}_inv") for name in tensors):  # as some files call the scales of FP8
        layout = replace(layout, scale=f"{layout.scale}_inv")
    suffix = f".{layout.scale}" if layout.joint else layout.weight
    modules = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    storage, weights = format_of(layout.storage), dict[str, PackedTensor | None]()
    reader = storage.load(storage.files.reader)
    for module in modules:
        stored = {leaf: tensors.get(f"{module}{layout.joint}{leaf}") for leaf in layout.leaves}
        own = {leaf: tensor for leaf, tensor in stored.items() if isinstance(tensor, StoredTensor)}
        weights[f"{module}.weight" if layout.joint else module] = reader.of_parts(own, layout)
    parts = {f"{module}{layout.joint}{leaf}" for module in modules for leaf in layout.leaves}
    found = {name: tensor for name, tensor in weights.items() if tensor}
    if len(found) < len(weights) or not weights:
        unfit = next((name for name in weights if name not in found), "any layer")
        raise CheckpointError(
            f"{folder} holds no {layout.storage} weight for {unfit}, though its config.json describes "
            f"them: {', '.join(layout.leaves)} that fit each other are required"
        )
    said = {name: shape for name, tensor in found.items() if (shape := tensor.parts.get(_SHAPE))}
    for name, sizes in read_small(said).items():
        if tuple(sizes) != found[name].shape:
            raise CheckpointError(
                f"{folder} holds weights of {name} with sizes {found[name].shape}, and its {_SHAPE} says "
                f"{tuple(sizes)}: copy or download it again"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | found

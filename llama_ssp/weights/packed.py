"""Weights that checkpoints store quantized; a layer's tensors become one weight that is read as `byte_rows`.

    compressed-tensors   weight_packed (O, I / 8), weight_scale (O, G), weight_zero_point (O / 8, G) unless symmetric,
                         weight_g_idx (I,) if inputs are sorted
    GPTQ                 qweight (I / 8, O), scales (G, O), qzeros (G, O / 8), g_idx (I,); of 8 bits / 4 in place of 8
    AWQ                  qweight (I, O / 8), scales (G, O), qzeros (G, O / 8)
    int8, FP8            weight (O, I) or, of int8, weight_packed (O, I / 4); weight_scale per output, matrix or block,
                         which some files with FP8 call weight_scale_inv
    bitsandbytes         weight (O, I) in int8, SCB (O,), 127 times the scales; of 4 bits see `bnb_files`
    MXFP4, NVFP4         weight_packed (O, I / 2), weight_scale (O, S), of NVFP4 weight_global_scale (), which divides
    NVFP4 of modelopt    weight (O, I / 2), weight_scale (O, S), weight_scale_2 (), which multiplies
    mxfp4 of gpt-oss     NAME_blocks (X, O, S, 16), NAME_scales (X, O, S) of the tensor NAME (X, I, O) of all experts

Eight codes are an int32, the first in the lowest bits; AWQ's are those of the outputs 0, 2, 4, 6, 1, 3, 5, 7. A code
without a zero has the zero 8; version 1 of GPTQ stores zeros that are 1 too small. Packed int8 weights are bytes that
are 128 too large. GPTQ and compressed-tensors may sort the inputs by importance (desc_act, actorder), which scatters
the groups, so that they are read in the order of `int4_rows`. A static actorder, or weight, keeps them in place.

Floats of 4 bits are two a byte, the first in its low half.

Shapes: X experts, O outputs, I inputs, G groups of inputs, S groups of 32 inputs, or of 16.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.settings.formats import INT4_GROUPS
from llama_ssp.settings.stored import BNB_FORM, PackedLayout
from llama_ssp.weights import bnb_files, byte_rows, fp4_rows, int4_rows
from llama_ssp.weights.source import StoredTensor, TensorFacts, Wanted

_CODES_OF_A_WORD, _BYTES_OF_A_WORD, _SIGN_BIT = 8, 4, 128
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of a word of AWQ."""
_ZERO = 8
"""Of symmetric weights."""
_INT4, _OF_BNB = "int4_weight_only", ("nf4", "fp4")
_KINDS = {"int8_weight_only": "I8", "fp8_weight_only": "F8_E4M3", "mxfp4": "U8", "nvfp4": "F8_E4M3"}
"""The dtype of weights that are not packed into words, or of scales of `fp4_rows`, as files call it."""


@dataclass(frozen=True, kw_only=True)
class PackedTensor(TensorFacts):
    """The weight of a layer, or of all experts, whose `parts` are stored tensors by the last part of their names."""

    layout: PackedLayout
    parts: Mapping[str, StoredTensor]

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """Read rows, as `byte_rows` describes them, of all or some outputs (dim 0), or one part of the inputs (dim 1).

        This part has whole groups. CheckpointError if a file has changed, or its groups are others than it describes.
        """
        dim = wanted.get("dim")
        if len(self.shape) == 3:  # noqa: PLR2004 - experts, inputs and outputs
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

    def _rows(self, outputs: range, inputs: range) -> Tensor:
        if self.layout.is_scattered:
            return self._sorted(outputs, inputs)
        group = self.layout.group
        assert not group or inputs.start % group == 0 == inputs.stop % group, "a slice has whole groups"
        if self.layout.storage in _OF_BNB:
            return bnb_files.rows(self.parts, self.shape[1], outputs=outputs, inputs=inputs)
        if self.layout.storage in fp4_rows.SCALES:
            return self._floats(outputs, inputs)
        self._check_order(inputs)
        rows, rows_O = self._blocks(outputs, 0)
        columns, columns_G = self._blocks(inputs[:: group or len(inputs)], 1)
        if self.layout.storage == _INT4:
            scales_OG, zeros_OG = (each[:, columns_G] for each in self._steps(outputs, columns))
            return int4_rows.pack(self._codes(outputs, inputs), scales_OG, zeros_OG)
        self._check_zeros(outputs, columns)
        scales_OG = self._matrix(self.layout.scale, rows, columns).float()[rows_O][:, columns_G] / self.layout.steps
        return byte_rows.join(self._bytes(outputs, inputs).unflatten(1, (len(columns_G), -1)), scales_OG)

    def _floats(self, outputs: range, inputs: range) -> Tensor:
        codes, scales = (
            self.parts[leaf].read(outputs, range(inputs.start // width, inputs.stop // width))
            for leaf in (self.layout.weight, self.layout.scale)
            for width in [self.shape[1] // self.parts[leaf].shape[1]]
        )
        factor = self.parts[self.layout.factor].read().float().view(1) if self.layout.factor else torch.ones(1)
        factor = 1 / factor if self.layout.divides else factor
        return fp4_rows.pack(_codes(codes.flatten(1)), scales.view(torch.uint8), factor.expand(len(outputs)))

    def _steps(self, outputs: range, groups: range) -> tuple[Tensor, Tensor]:
        """The scales and the zeros (O, G) of some groups of the file."""
        scales_OG = self._matrix(self.layout.scale, outputs, groups).float()
        if self.layout.zero not in self.parts:
            return scales_OG, torch.full_like(scales_OG, _ZERO)
        return scales_OG, self._along_outputs(self.layout.zero, outputs, groups) + self.layout.least_zero

    def _sorted(self, outputs: range, inputs: range) -> Tensor:
        """Rows whose inputs are sorted by their groups; of a part of the inputs in groups of 32, with gaps."""
        stored, size, group = self.parts[self.layout.order], self.layout.block[1], self.layout.group
        assert size, "one group cannot be scattered"
        groups_I, groups = stored.read(inputs).long(), range(self.shape[1] // size)
        counts_G = groups_I.clamp(0, len(groups)).bincount(minlength=len(groups))
        is_whole = len(inputs) == self.shape[1]
        if len(counts_G) > len(groups) or (is_whole and len(counts_G.unique()) > 1) or groups_I.min() < 0:
            raise CheckpointError(
                f"{stored.file} has {stored.name} of other groups than {len(groups)} of {size} inputs: copy or "
                "download it again"
            )
        order_I, codes_OI = groups_I.argsort(stable=True), self._codes(outputs, inputs)
        sizes_G = counts_G
        if not is_whole:
            group, sorted_I = INT4_GROUPS[-1], groups_I[order_I]
            sizes_G = -(-counts_G // group) * group
            places_I = torch.arange(len(inputs)) + (sizes_G - counts_G).cumsum(0)[sorted_I]
            places_I -= (sizes_G - counts_G)[sorted_I]
            sizes_G[-1] += self.layout.num_with_gaps(len(inputs), of=self.shape[1]) - sizes_G.sum()
            with_gaps_I = torch.full((int(sizes_G.sum()),), int4_rows.GAP)
            order_I = with_gaps_I.scatter_(0, places_I, order_I)
        codes_OI = codes_OI[:, order_I.where(order_I < int4_rows.GAP, 0)]
        scales_OG, zeros_OG = (each.repeat_interleave(sizes_G // group, dim=1) for each in self._steps(outputs, groups))
        return int4_rows.pack(codes_OI, scales_OG, zeros_OG, order_I)

    def _blocks(self, places: range, dim: int) -> tuple[range, Tensor]:
        """The blocks that some outputs or inputs are in, and the place of each one's block among them."""
        size = self.layout.block[dim] or self.shape[dim]
        blocks = range(places[0] // size, places[-1] // size + 1)
        return blocks, torch.tensor(places) // size - blocks.start

    def _bytes(self, outputs: range, inputs: range) -> Tensor:
        stored = self.parts[self.layout.weight]
        if stored.kind != "I32":
            return stored.read(outputs, inputs).view(torch.uint8)
        words = range(inputs.start // _BYTES_OF_A_WORD, inputs.stop // _BYTES_OF_A_WORD)
        return (
            self._matrix(self.layout.weight, outputs, words)
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)
            ^ _SIGN_BIT
        )

    def _codes(self, outputs: range, inputs: range) -> Tensor:
        if self.layout.joins_outputs:
            return self._along_outputs(self.layout.weight, outputs, inputs).contiguous()
        words = range(inputs.start // _CODES_OF_A_WORD, inputs.stop // _CODES_OF_A_WORD)
        return _codes(self._matrix(self.layout.weight, outputs, words))

    def _along_outputs(self, leaf: str, outputs: range, columns: range) -> Tensor:
        """Codes (O, C) of a matrix whose words join those of eight outputs."""
        words = range(outputs.start // _CODES_OF_A_WORD, -(-outputs.stop // _CODES_OF_A_WORD))
        codes_CO = _codes(self._matrix(leaf, words, columns).t())
        if self.layout.joins_outputs:
            codes_CO = codes_CO.unflatten(1, (-1, _CODES_OF_A_WORD))[:, :, _NIBBLE_OF_OUTPUT].flatten(1)
        first = words.start * _CODES_OF_A_WORD
        return codes_CO[:, outputs.start - first : outputs.stop - first].t()

    def _matrix(self, leaf: str, rows: range, columns: range) -> Tensor:
        """A part of a stored matrix, or of a vector that stands for a column, with the outputs first."""
        stored = self.parts[leaf]
        if len(stored.shape) < 2:  # noqa: PLR2004 - a matrix
            return stored.read().view(-1, 1)[rows.start : rows.stop]
        return stored.read(columns, rows).t() if self.layout.has_inputs_first else stored.read(rows, columns)

    def _check_zeros(self, outputs: range, groups: range) -> None:
        """CheckpointError if int8 weights have another zero than the middle."""
        if stored := self.parts.get(self.layout.zero):
            words = range(outputs.start // _BYTES_OF_A_WORD, -(-outputs.stop // _BYTES_OF_A_WORD))
            zeros = self._matrix(self.layout.zero, words, groups).clone(memory_format=torch.contiguous_format)
            if not bool((zeros.view(torch.uint8) == _SIGN_BIT - self.layout.least_zero).all()):
                raise CheckpointError(
                    f"{stored.file} has other zeros than the middle in {stored.name}, and its config.json says that "
                    "weights are symmetric (sym): copy or download the folder again"
                )

    def _check_order(self, inputs: range) -> None:
        stored, size = self.parts.get(self.layout.order), self.layout.block[1] or self.shape[1]
        if stored and not torch.equal(stored.read(inputs).long(), torch.tensor(inputs) // size):
            raise CheckpointError(
                f"{stored.file} scatters the groups of {stored.name}, and its config.json does not say so (desc_act, "
                "actorder): copy or download the folder again"
            )


def _codes(words: Tensor) -> Tensor:
    """The codes of int32 words (N, M), shape (N, 8 M)."""
    pairs = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)


def combine(
    tensors: Mapping[str, StoredTensor], layout: PackedLayout, folder: Path
) -> Mapping[str, StoredTensor | PackedTensor]:
    """Replace the parts of each quantized weight by the weight; CheckpointError if they do not fit each other."""
    if any(name.endswith(f".{layout.scale}_inv") for name in tensors):  # as some files call the scales of FP8
        layout = replace(layout, scale=f"{layout.scale}_inv")
    suffix = f".{layout.scale}" if layout.joint else layout.weight
    modules = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    weights = {f"{module}.weight" if layout.joint else module: _packed(tensors, layout, module) for module in modules}
    parts = {f"{module}{layout.joint}{leaf}" for module in modules for leaf in layout.leaves}
    found = {name: tensor for name, tensor in weights.items() if tensor}
    if len(found) < len(weights) or not weights:
        unfit = next((name for name in weights if name not in found), "any layer")
        raise CheckpointError(
            f"{folder} holds no {layout.storage} weight for {unfit}, though its config.json describes "
            f"them: {', '.join(layout.leaves)} that fit each other are required"
        )
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | found


def _shapes(num_rows: int, num_columns: int) -> list[tuple[int, ...]]:
    """The shapes that a matrix of scales may have in a file."""
    vectors: list[tuple[int, ...]] = [(num_rows,)] if num_columns == 1 else []
    return [(num_rows, num_columns), *vectors, *([()] if num_rows == num_columns == 1 else [])]


def _packed(tensors: Mapping[str, StoredTensor], layout: PackedLayout, module: str) -> PackedTensor | None:
    """The weight of a module; None if its parts do not fit each other."""
    parts = {leaf: tensor for leaf in layout.leaves if (tensor := tensors.get(f"{module}{layout.joint}{leaf}"))}
    make = partial(PackedTensor, storage=layout.storage, group=layout.slice_group, layout=layout, parts=parts)
    if layout.storage in fp4_rows.SCALES:
        shape = _shape_of_floats(parts, layout)
        return make(dtype=torch.bfloat16, shape=shape) if shape else None
    step = -1 if layout.has_inputs_first else 1
    matrices = {leaf: tensor.shape[::step] for leaf, tensor in parts.items() if len(tensor.shape) == 2}  # noqa: PLR2004 - a matrix
    if layout.weight not in matrices or layout.scale not in parts:
        return None
    if layout.storage in _OF_BNB:
        shape = bnb_files.shape_of(parts, layout.storage)
        return make(dtype=torch.float32, shape=shape) if shape else None
    num_outputs, num_inputs = matrices[layout.weight]
    is_int4 = layout.storage == _INT4
    kind = "I32" if is_int4 or layout.weight in ("weight_packed", "qweight") else _KINDS[layout.storage]
    num_codes = _CODES_OF_A_WORD if is_int4 else _BYTES_OF_A_WORD
    if layout.joins_outputs:
        num_outputs *= num_codes
    elif kind == "I32":
        num_inputs *= num_codes
    dtype, shape = parts[layout.scale].dtype, (num_outputs, num_inputs)
    num_blocks, num_groups = (-(-whole // (size or whole)) for whole, size in zip(shape, layout.block, strict=True))
    fits = parts[layout.weight].kind == kind and dtype is not None
    fits &= kind != "I32" or num_inputs % num_groups == 0
    fits &= parts[layout.scale].shape[::step] in _shapes(num_blocks, num_groups)
    fits &= not layout.is_scattered or (layout.order in parts and num_inputs < int4_rows.GAP)
    if zero := parts.get(layout.zero):
        fits &= zero.kind == "I32" and matrices.get(layout.zero) == (-(-num_outputs // num_codes), num_groups)
    if form := parts.get(BNB_FORM):
        fits &= form.shape == () and int(form.read()) == 0
    if order := parts.get(layout.order):
        fits &= order.shape == (num_inputs,)
    return make(dtype=dtype, shape=shape) if fits else None


def _shape_of_floats(parts: Mapping[str, StoredTensor], layout: PackedLayout) -> tuple[int, ...] | None:
    """The shape of a weight of `fp4_rows`, (X, I, O) of all experts; None if its parts do not fit each other."""
    weight, scale, factor = (parts.get(leaf) for leaf in (layout.weight, layout.scale, layout.factor))
    size = layout.block[1] or 0
    if not (weight and scale and bool(layout.factor) == bool(factor) and len(scale.shape) == 2 + (not layout.joint)):
        return None
    *experts, num_outputs, num_scales = scale.shape
    num_inputs = num_scales * size
    fits = (weight.kind, scale.kind) == ("U8", _KINDS[layout.storage]) and num_inputs % layout.group == 0
    codes = (num_scales, size // 2) if experts else (num_inputs // 2,)
    fits &= weight.shape == (*experts, num_outputs, *codes) and (not factor or factor.shape in ((), (1,)))
    shape = (*experts, num_inputs, num_outputs) if experts else (num_outputs, num_inputs)
    return shape if fits else None

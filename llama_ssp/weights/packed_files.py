"""Packed weights as files have them, read as `byte_rows`, with the same bits; layouts are drawn in `packed`.

Those of 4 bits of bitsandbytes:

    weight                                     (O I / 2, 1), two codes a byte, row by row
    weight.absmax                              (O I / 64,), the scales in fp32, or in bytes if those are quantized too:
    weight.nested_quant_map, .nested_absmax    the number of each byte, and the scale of each 256 bytes
    weight.quant_state.bitsandbytes__KIND      JSON: the shape, and what is added to all scales

Shapes: X experts, O outputs, I inputs, G groups of inputs.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.storage.floats import BNB_STATE
from llama_ssp.storage.formats import INT4_GROUPS, PackedLayout, format_of
from llama_ssp.storage.formats import NF4_GROUP as GROUP
from llama_ssp.storage.integers import BNB_FORM
from llama_ssp.weights import byte_rows, fp4_rows, int4_rows
from llama_ssp.weights.packed import BlockTensor, Facts, PackedTensor
from llama_ssp.weights.source import StoredTensor

_SIGN_BIT = 128
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]
"""Order of the codes in a word of AWQ."""
_ZERO = 8
"""Zero of symmetric weights."""
_SCALES, _NUMBERS, _OUTER = "weight.absmax", "weight.nested_quant_map", "weight.nested_absmax"
_NESTED = 256
"""Scales that share a scale."""


class ByteTensor(BlockTensor):
    """A weight with a byte for each number."""

    codes_of_a_word = 4

    @classmethod
    def _facts(cls, parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        if (form := parts.get(BNB_FORM)) and (form.shape != () or int(form.read())):
            return None
        return super()._facts(parts, layout)

    def _rows(self, outputs: range, inputs: range) -> Tensor:
        group = self.layout.group
        assert not group or inputs.start % group == 0 == inputs.stop % group, "a slice has whole groups"
        self._check_order(inputs)
        rows, rows_O = self._blocks(outputs, 0)
        columns, columns_G = self._blocks(inputs[:: group or len(inputs)], 1)
        self._check_zeros(outputs, columns)
        scales_OG = self._matrix(self.layout.scale, rows, columns).float()[rows_O][:, columns_G] / self.layout.steps
        return byte_rows.join(self._bytes(outputs, inputs).unflatten(1, (len(columns_G), -1)), scales_OG)

    def _bytes(self, outputs: range, inputs: range) -> Tensor:
        stored = self.parts[self.layout.weight]
        if stored.kind != "I32":
            return stored.read(outputs, inputs).view(torch.uint8)
        words = range(inputs.start // self.codes_of_a_word, inputs.stop // self.codes_of_a_word)
        return (
            self._matrix(self.layout.weight, outputs, words)
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)
            ^ _SIGN_BIT
        )

    def _check_zeros(self, outputs: range, groups: range) -> None:
        """CheckpointError if int8 weights have another zero than the middle."""
        if stored := self.parts.get(self.layout.zero):
            words = range(outputs.start // self.codes_of_a_word, -(-outputs.stop // self.codes_of_a_word))
            zeros = self._matrix(self.layout.zero, words, groups).clone(memory_format=torch.contiguous_format)
            if not bool((zeros.view(torch.uint8) == _SIGN_BIT - self.layout.least_zero).all()):
                raise CheckpointError(
                    f"{stored.file} has other zeros than the middle in {stored.name}, and its config.json says that "
                    "weights are symmetric (sym): copy or download the folder again"
                )


class Int4Tensor(BlockTensor):
    """A weight of codes with a scale and a zero per group."""

    codes_of_a_word = 8

    def _rows(self, outputs: range, inputs: range) -> Tensor:
        if self.layout.is_scattered:
            return self._sorted(outputs, inputs)
        group = self.layout.group
        assert inputs.start % group == 0 == inputs.stop % group, "a slice has whole groups"
        self._check_order(inputs)
        columns, columns_G = self._blocks(inputs[::group], 1)
        scales_OG, zeros_OG = (values[:, columns_G] for values in self._steps(outputs, columns))
        return int4_rows.pack(self._codes(outputs, inputs), scales_OG, zeros_OG)

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
        scales_OG, zeros_OG = (
            values.repeat_interleave(sizes_G // group, dim=1) for values in self._steps(outputs, groups)
        )
        return int4_rows.pack(codes_OI, scales_OG, zeros_OG, order_I)

    def _codes(self, outputs: range, inputs: range) -> Tensor:
        if self.layout.joins_outputs:
            return self._along_outputs(self.layout.weight, outputs, inputs).contiguous()
        words = range(inputs.start // self.codes_of_a_word, inputs.stop // self.codes_of_a_word)
        return int4_rows.codes_of_words(self._matrix(self.layout.weight, outputs, words))

    def _along_outputs(self, leaf: str, outputs: range, columns: range) -> Tensor:
        """Codes (O, C) of a matrix whose words join those of eight outputs."""
        words = range(outputs.start // self.codes_of_a_word, -(-outputs.stop // self.codes_of_a_word))
        codes_CO = int4_rows.codes_of_words(self._matrix(leaf, words, columns).t())
        if self.layout.joins_outputs:
            codes_CO = codes_CO.unflatten(1, (-1, self.codes_of_a_word))[:, :, _NIBBLE_OF_OUTPUT].flatten(1)
        first = words.start * self.codes_of_a_word
        return codes_CO[:, outputs.start - first : outputs.stop - first].t()


class Fp4Tensor(PackedTensor):
    """A weight (O, I) of floats of 4 bits, or those of all experts (X, I, O)."""

    @staticmethod
    def _facts(parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        weight, scale, factor = (parts.get(leaf) for leaf in (layout.weight, layout.scale, layout.factor))
        size = layout.block[1] or 0
        if not (weight and scale and bool(layout.factor) == bool(factor)):
            return None
        if len(scale.shape) != 2 + (not layout.joint):
            return None
        *experts, num_outputs, num_scales = scale.shape
        num_inputs, kinds = num_scales * size, ("U8", format_of(layout.storage).stored_kind)
        fits = (weight.kind, scale.kind) == kinds and num_inputs % layout.group == 0
        codes = (num_scales, size // 2) if experts else (num_inputs // 2,)
        fits &= weight.shape == (*experts, num_outputs, *codes) and (not factor or factor.shape in ((), (1,)))
        shape = (*experts, num_inputs, num_outputs) if experts else (num_outputs, num_inputs)
        return (torch.bfloat16, shape) if fits else None

    def _rows(self, outputs: range, inputs: range) -> Tensor:
        codes, scales = (
            self.parts[leaf].read(outputs, range(inputs.start // width, inputs.stop // width))
            for leaf in (self.layout.weight, self.layout.scale)
            for width in [self.shape[1] // self.parts[leaf].shape[1]]
        )
        factor = self.parts[self.layout.factor].read().float().view(1) if self.layout.factor else torch.ones(1)
        factor = 1 / factor if self.layout.divides else factor
        return fp4_rows.pack(
            int4_rows.codes_of_words(codes.flatten(1)), scales.view(torch.uint8), factor.expand(len(outputs))
        )


class BnbTensor(PackedTensor):
    """A weight of nf4 or fp4, two codes a byte, as bitsandbytes stores it.

    Source: Dettmers et al. 2023, arXiv:2305.14314.
    """

    @staticmethod
    def _facts(parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        state = _state(parts)
        match state.get("shape"):
            case [int(num_outputs), int(num_inputs)] if num_outputs > 0 and num_inputs > 0 and num_inputs % GROUP == 0:
                num_scales = num_outputs * num_inputs // GROUP
            case _:
                return None
        if not {layout.weight, layout.scale} <= parts.keys():
            return None
        weight, scales = parts[layout.weight], parts[layout.scale]
        fits = (state.get("quant_type"), state.get("blocksize")) == (layout.storage, GROUP)
        fits &= (weight.kind, weight.shape) == ("U8", (num_scales * GROUP // 2, 1)) and scales.shape == (num_scales,)
        if scales.kind == "U8":
            shapes = [parts[name].shape for name in (_NUMBERS, _OUTER) if name in parts]
            fits &= shapes == [(_NESTED,), (-(-num_scales // _NESTED),)] and state.get("nested_blocksize") == _NESTED
        else:
            fits &= scales.kind == "F32"
        return (torch.float32, (num_outputs, num_inputs)) if fits else None

    def _rows(self, outputs: range, inputs: range) -> Tensor:
        num_bytes, num_groups = self.shape[1] // 2, self.shape[1] // GROUP
        codes = self.parts[self.layout.weight].read(range(outputs.start * num_bytes, outputs.stop * num_bytes))
        scales = _scales(self.parts, range(outputs.start * num_groups, outputs.stop * num_groups)).view(-1, num_groups)
        bytes_OI = codes.view(-1, num_bytes)[:, inputs.start // 2 : inputs.stop // 2]
        scales_OG = scales[:, inputs.start // GROUP : inputs.stop // GROUP]
        return byte_rows.join(bytes_OI.unflatten(1, (-1, GROUP // 2)), scales_OG)


def _scales(parts: Mapping[str, StoredTensor], places: range) -> Tensor:
    """Some of the scales, in fp32."""
    stored = parts[_SCALES].read(places)
    if stored.is_floating_point():
        return stored
    outer = parts[_OUTER].read()[torch.arange(places.start, places.stop) // _NESTED]
    return parts[_NUMBERS].read()[stored.long()] * outer + float(_state(parts)["nested_offset"])


def _state(parts: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The JSON of a weight; empty if there is none."""
    try:
        (stored,) = (tensor for name, tensor in parts.items() if name.startswith(BNB_STATE))
        state = json.loads(bytes(stored.read().tolist()))
    except (ValueError, TypeError):
        return {}
    return state if isinstance(state, dict) else {}

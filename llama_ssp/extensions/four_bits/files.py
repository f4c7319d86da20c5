"""Weights of 4 bits each, as files store them; `weights.packed` shows the layouts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.storage.formats import INT4_GROUPS, PackedLayout, format_of
from llama_ssp.weights import byte_rows
from llama_ssp.weights.block_files import BlockTensor
from llama_ssp.weights.packed import Facts, PackedTensor
from llama_ssp.weights.source import StoredTensor

_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]
"""Order of the codes in a word of AWQ."""


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
        return byte_rows.pack_int4(self._codes(outputs, inputs), scales_OG, zeros_OG)

    def _steps(self, outputs: range, groups: range) -> tuple[Tensor, Tensor]:
        """Return the scales and the zeros (O, G) of some groups, as the file has them."""
        scales_OG = self._matrix(self.layout.scale, outputs, groups).float()
        if self.layout.zero not in self.parts:
            return scales_OG, torch.full_like(scales_OG, 8)  # symmetric weights
        return scales_OG, self._along_outputs(self.layout.zero, outputs, groups) + self.layout.least_zero

    def _sorted(self, outputs: range, inputs: range) -> Tensor:
        """Return rows whose inputs are sorted by their groups; a part of the inputs is in groups of 32, with gaps."""
        stored, size, group = self.parts[self.layout.order], self.layout.block[1], self.layout.group
        assert size, "one group cannot be scattered"
        groups_I, groups = stored.mapped(inputs).long(), range(self.shape[1] // size)
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
            with_gaps_I = torch.full((int(sizes_G.sum()),), byte_rows.GAP)
            order_I = with_gaps_I.scatter_(0, places_I, order_I)
        codes_OI = codes_OI[:, order_I.where(order_I < byte_rows.GAP, 0)]
        scales_OG, zeros_OG = (
            values.repeat_interleave(sizes_G // group, dim=1) for values in self._steps(outputs, groups)
        )
        return byte_rows.pack_int4(codes_OI, scales_OG, zeros_OG, order_I)

    def _codes(self, outputs: range, inputs: range) -> Tensor:
        if self.layout.joins_outputs:
            return self._along_outputs(self.layout.weight, outputs, inputs).contiguous()
        return byte_rows.codes_of_words(self._matrix(self.layout.weight, outputs, self._words(inputs)))

    def _along_outputs(self, leaf: str, outputs: range, columns: range) -> Tensor:
        """Return codes (O, C) of a matrix whose words each hold the codes of eight outputs."""
        words = self._words(outputs)
        codes_CO = byte_rows.codes_of_words(self._matrix(leaf, words, columns).t())
        if self.layout.joins_outputs:
            codes_CO = codes_CO.unflatten(1, (-1, self.codes_of_a_word))[:, :, _NIBBLE_OF_OUTPUT].flatten(1)
        first = words.start * self.codes_of_a_word
        return codes_CO[:, outputs.start - first : outputs.stop - first].t()


class Fp4Tensor(PackedTensor):
    """A stored weight (O, I) in E2M1, or the weights of all experts (X, I, O)."""

    @staticmethod
    def _facts(parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        weight, scale, factor = (parts.get(leaf) for leaf in (layout.weight, layout.scale, layout.factor))
        size = layout.block[1] or 0
        if not (weight and scale and bool(layout.factor) == bool(factor)):
            return None
        if len(scale.shape) != 2 + (not layout.joint):
            return None
        *experts, num_outputs, num_scales = scale.shape
        num_inputs, kinds = num_scales * size, ("U8", format_of(layout.storage).files.stored_kind)
        fits = (weight.kind, scale.kind) == kinds and num_inputs % layout.group == 0
        codes = (num_scales, size // 2) if experts else (num_inputs // 2,)
        fits &= weight.shape == (*experts, num_outputs, *codes) and (not factor or factor.shape in ((), (1,)))
        shape = (*experts, num_inputs, num_outputs) if experts else (num_outputs, num_inputs)
        return (torch.bfloat16, shape) if fits else None

    def _rows(self, outputs: range, inputs: range) -> Tensor:
        codes, scales = (
            self.parts[leaf].mapped(outputs, range(inputs.start // width, inputs.stop // width))
            for leaf in (self.layout.weight, self.layout.scale)
            for width in [self.shape[1] // self.parts[leaf].shape[1]]
        )
        factor = self.parts[self.layout.factor].mapped().float().view(1) if self.layout.factor else torch.ones(1)
        factor = 1 / factor if self.layout.divides else factor
        return byte_rows.pack_fp4(
            byte_rows.codes_of_words(codes.flatten(1)), scales.view(torch.uint8), factor.expand(len(outputs))
        )

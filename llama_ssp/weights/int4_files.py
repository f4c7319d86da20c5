"""Weights of 4 bits as files have them, and the same bits in `int4_rows`; layouts are drawn in `packed`."""

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.storage.formats import INT4_GROUPS
from llama_ssp.weights import int4_rows
from llama_ssp.weights.packed import BlockTensor

_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]
"""Order of the codes in a word of AWQ."""
_ZERO = 8
"""Zero of symmetric weights."""


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

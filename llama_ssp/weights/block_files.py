"""Integers or FP8 whose scales are a matrix over blocks, as files have them; layouts are drawn in `packed`."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.storage.formats import INT4_GROUPS, PackedLayout, format_of
from llama_ssp.storage.int8 import BNB_FORM
from llama_ssp.weights import byte_rows
from llama_ssp.weights.packed import Facts, PackedTensor
from llama_ssp.weights.source import StoredTensor

_SIGN_BIT = 128
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]
"""Order of the codes in a word of AWQ."""


class BlockTensor(PackedTensor):
    """Integers or FP8 whose scales are a matrix over blocks; of words, each has `codes_of_a_word`."""

    codes_of_a_word: ClassVar[int]

    @classmethod
    def _facts(cls, parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        step = -1 if layout.has_inputs_first else 1
        matrices = {leaf: tensor.shape[::step] for leaf, tensor in parts.items() if len(tensor.shape) == 2}  # noqa: PLR2004 - a matrix
        if layout.weight not in matrices or layout.scale not in parts:
            return None
        num_outputs, num_inputs = matrices[layout.weight]
        has_words = layout.weight in ("weight_packed", "qweight")
        if layout.joins_outputs:
            num_outputs *= cls.codes_of_a_word
        elif has_words:
            num_inputs *= cls.codes_of_a_word
        dtype, shape = parts[layout.scale].dtype, (num_outputs, num_inputs)
        kind = "I32" if has_words else format_of(layout.storage).stored_kind
        num_blocks, num_groups = (-(-whole // (size or whole)) for whole, size in zip(shape, layout.block, strict=True))
        if dtype is None or parts[layout.weight].kind != kind:
            return None
        fits = not has_words or num_inputs % num_groups == 0
        scale = parts[layout.scale].shape[::step]  # files may leave out dimensions of 1 at its end
        fits &= (*scale, *(1,) * (2 - len(scale))) == (num_blocks, num_groups)
        fits &= not layout.is_scattered or (layout.order in parts and num_inputs < byte_rows.GAP)
        if zero := parts.get(layout.zero):
            words = -(-num_outputs // cls.codes_of_a_word), num_groups
            fits &= zero.kind == "I32" and matrices.get(layout.zero) == words
        if order := parts.get(layout.order):
            fits &= order.shape == (num_inputs,)
        return (dtype, shape) if fits else None

    def _blocks(self, places: range, dim: int) -> tuple[range, Tensor]:
        """The blocks that some outputs or inputs are in, and the place of each one's block among them."""
        size = self.layout.block[dim] or self.shape[dim]
        blocks = range(places[0] // size, places[-1] // size + 1)
        return blocks, torch.tensor(places) // size - blocks.start

    def _matrix(self, leaf: str, rows: range, columns: range) -> Tensor:
        """A part of a stored matrix, or of a vector that stands for a column, with the outputs first."""
        stored = self.parts[leaf]
        if len(stored.shape) < 2:  # noqa: PLR2004 - a matrix
            return stored.mapped().view(-1, 1)[rows.start : rows.stop]
        return stored.mapped(columns, rows).t() if self.layout.has_inputs_first else stored.mapped(rows, columns)

    def _words(self, places: range) -> range:
        """The words of a file that have the codes of some outputs or inputs."""
        return range(places.start // self.codes_of_a_word, -(-places.stop // self.codes_of_a_word))

    def _check_order(self, inputs: range) -> None:
        stored, size = self.parts.get(self.layout.order), self.layout.block[1] or self.shape[1]
        if stored and not torch.equal(stored.mapped(inputs).long(), torch.tensor(inputs) // size):
            raise CheckpointError(
                f"{stored.file} scatters the groups of {stored.name}, and its config.json does not say so (desc_act, "
                "actorder): copy or download the folder again"
            )


class ByteTensor(BlockTensor):
    """A weight with a byte for each number."""

    codes_of_a_word = 4

    @classmethod
    def _facts(cls, parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        if (form := parts.get(BNB_FORM)) and (form.shape != () or int(form.mapped())):
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
            return stored.mapped(outputs, inputs).view(torch.uint8)
        return byte_rows.bytes_of(self._matrix(self.layout.weight, outputs, self._words(inputs))) ^ _SIGN_BIT

    def _check_zeros(self, outputs: range, groups: range) -> None:
        """CheckpointError if int8 weights have another zero than the middle."""
        if stored := self.parts.get(self.layout.zero):
            zeros = byte_rows.bytes_of(self._matrix(self.layout.zero, self._words(outputs), groups))
            if not bool((zeros == _SIGN_BIT - self.layout.least_zero).all()):
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
        return byte_rows.pack_int4(self._codes(outputs, inputs), scales_OG, zeros_OG)

    def _steps(self, outputs: range, groups: range) -> tuple[Tensor, Tensor]:
        """The scales and the zeros (O, G) of some groups of the file."""
        scales_OG = self._matrix(self.layout.scale, outputs, groups).float()
        if self.layout.zero not in self.parts:
            return scales_OG, torch.full_like(scales_OG, 8)  # symmetric weights
        return scales_OG, self._along_outputs(self.layout.zero, outputs, groups) + self.layout.least_zero

    def _sorted(self, outputs: range, inputs: range) -> Tensor:
        """Rows whose inputs are sorted by their groups; of a part of the inputs in groups of 32, with gaps."""
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
        """Codes (O, C) of a matrix whose words join the codes of eight outputs."""
        words = self._words(outputs)
        codes_CO = byte_rows.codes_of_words(self._matrix(leaf, words, columns).t())
        if self.layout.joins_outputs:
            codes_CO = codes_CO.unflatten(1, (-1, self.codes_of_a_word))[:, :, _NIBBLE_OF_OUTPUT].flatten(1)
        first = words.start * self.codes_of_a_word
        return codes_CO[:, outputs.start - first : outputs.stop - first].t()

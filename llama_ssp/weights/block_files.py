"""Integers or FP8 whose scales are a matrix over blocks, as files store them; `packed` shows the layouts."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.storage.formats import PackedLayout, format_of
from llama_ssp.weights import byte_rows
from llama_ssp.weights.packed import Facts, PackedTensor
from llama_ssp.weights.source import StoredTensor


class BlockTensor(PackedTensor):
    """Integers or FP8 whose scales are a matrix over blocks; of words, each has `codes_of_a_word`."""

    codes_of_a_word: ClassVar[int]

    @classmethod
    def _facts(cls, parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        step = -1 if layout.has_inputs_first else 1
        matrices = {leaf: tensor.shape[::step] for leaf, tensor in parts.items() if len(tensor.shape) == 2}
        if layout.weight not in matrices or layout.scale not in parts:
            return None
        num_outputs, num_inputs = matrices[layout.weight]
        has_words = layout.weight in ("weight_packed", "qweight")
        if layout.joins_outputs:
            num_outputs *= cls.codes_of_a_word
        elif has_words:
            num_inputs *= cls.codes_of_a_word
        dtype, shape = parts[layout.scale].dtype, (num_outputs, num_inputs)
        kind = "I32" if has_words else format_of(layout.storage).files.stored_kind
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
        """Return the blocks that some outputs or inputs are in, and the index of each one's block among these."""
        size = self.layout.block[dim] or self.shape[dim]
        blocks = range(places[0] // size, places[-1] // size + 1)
        return blocks, torch.tensor(places) // size - blocks.start

    def _matrix(self, leaf: str, rows: range, columns: range) -> Tensor:
        """Return a part of a stored matrix, or of a vector stored in place of a column, with the outputs first."""
        stored = self.parts[leaf]
        if len(stored.shape) < 2:
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

"""Weights of a byte each, as files store them; `weights.packed` shows the layouts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.extensions.eight_bits.records import BNB_FORM
from llama_ssp.storage.formats import PackedLayout
from llama_ssp.weights import byte_rows
from llama_ssp.weights.block_files import BlockTensor
from llama_ssp.weights.packed import Facts
from llama_ssp.weights.source import StoredTensor

_SIGN_BIT = 128


class ByteTensor(BlockTensor):
    """A stored weight with a byte for each number."""

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
        """Raise CheckpointError if a stored zero point of int8 weights is not the middle of the range."""
        if stored := self.parts.get(self.layout.zero):
            zeros = byte_rows.bytes_of(self._matrix(self.layout.zero, self._words(outputs), groups))
            if not bool((zeros == _SIGN_BIT - self.layout.least_zero).all()):
                raise CheckpointError(
                    f"{stored.file} has other zeros than the middle in {stored.name}, and its config.json says that "
                    "weights are symmetric (sym): copy or download the folder again"
                )

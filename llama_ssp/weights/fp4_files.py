"""Weights that are floats of 4 bits as files have them, and the same bits in `fp4_rows`; see `packed`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llama_ssp.storage.formats import PackedLayout, format_of
from llama_ssp.weights import fp4_rows, int4_rows
from llama_ssp.weights.packed import Facts, PackedTensor
from llama_ssp.weights.source import StoredTensor


class Fp4Tensor(PackedTensor):
    """A weight (O, I), or those of all experts (X, I, O)."""

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

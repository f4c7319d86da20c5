"""Weights in nf4 or fp4 as bitsandbytes stores them.

    weight                                     (O I / 2, 1), two codes a byte, row by row
    weight.absmax                              (O I / 64,), the scales in fp32, or in bytes if they are quantized too:
    weight.nested_quant_map, .nested_absmax    the number of each byte, and the scale of each 256 bytes
    weight.quant_state.bitsandbytes__KIND      JSON: the shape, and what is added to all scales

Shapes: O outputs, I inputs, G groups of 64 inputs.

Source: Dettmers et al. 2023, arXiv:2305.14314.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llama_ssp.extensions.bitsandbytes.records import BNB_STATE, NF4_GROUP
from llama_ssp.storage.formats import PackedLayout
from llama_ssp.weights import byte_rows
from llama_ssp.weights.packed import Facts, PackedTensor
from llama_ssp.weights.source import StoredTensor

_SCALES, _NUMBERS, _OUTER = "weight.absmax", "weight.nested_quant_map", "weight.nested_absmax"
_NESTED = 256
"""Number of quantized scales that share a scale of their own."""


class BnbTensor(PackedTensor):
    """A stored weight with two codes in each byte."""

    @staticmethod
    def _facts(parts: Mapping[str, StoredTensor], layout: PackedLayout) -> Facts | None:
        state = _state(parts)
        match state.get("shape"):
            case [int(num_outputs), int(num_inputs)] if (
                num_outputs > 0 and num_inputs > 0 and num_inputs % NF4_GROUP == 0
            ):
                num_scales = num_outputs * num_inputs // NF4_GROUP
            case _:
                return None
        if not {layout.weight, layout.scale} <= parts.keys():
            return None
        weight, scales = parts[layout.weight], parts[layout.scale]
        fits = (state.get("quant_type"), state.get("blocksize")) == (layout.storage, NF4_GROUP)
        fits &= (weight.kind, weight.shape) == ("U8", (num_scales * NF4_GROUP // 2, 1)) and scales.shape == (
            num_scales,
        )
        if scales.kind == "U8":
            shapes = [parts[name].shape for name in (_NUMBERS, _OUTER) if name in parts]
            fits &= shapes == [(_NESTED,), (-(-num_scales // _NESTED),)] and state.get("nested_blocksize") == _NESTED
        else:
            fits &= scales.kind == "F32"
        return (torch.float32, (num_outputs, num_inputs)) if fits else None

    def _rows(self, outputs: range, inputs: range) -> Tensor:
        num_bytes, num_groups = self.shape[1] // 2, self.shape[1] // NF4_GROUP
        codes = self.parts[self.layout.weight].mapped(range(outputs.start * num_bytes, outputs.stop * num_bytes))
        scales = _scales(self.parts, range(outputs.start * num_groups, outputs.stop * num_groups)).view(-1, num_groups)
        bytes_OI = codes.view(-1, num_bytes)[:, inputs.start // 2 : inputs.stop // 2]
        scales_OG = scales[:, inputs.start // NF4_GROUP : inputs.stop // NF4_GROUP]
        return byte_rows.join(bytes_OI.unflatten(1, (-1, NF4_GROUP // 2)), scales_OG)


def _scales(parts: Mapping[str, StoredTensor], places: range) -> Tensor:
    """Return some of the scales of groups, in fp32."""
    stored = parts[_SCALES].mapped(places)
    if stored.is_floating_point():
        return stored
    outer = parts[_OUTER].mapped()[torch.arange(places.start, places.stop) // _NESTED]
    return parts[_NUMBERS].mapped()[stored.long()] * outer + float(_state(parts)["nested_offset"])


def _state(parts: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the JSON that is stored with a weight; empty if there is none."""
    try:
        (stored,) = (tensor for name, tensor in parts.items() if name.startswith(BNB_STATE))
        state = json.loads(bytes(stored.mapped().tolist()))
    except (ValueError, TypeError):
        return {}
    return state if isinstance(state, dict) else {}

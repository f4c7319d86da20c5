"""Products that take in what stands around them: the norm, the gate and the residual (`gpu_kernels=fused`).

For up to 32 tokens of plain weights a layer then has seven kernels, two of them attention's:

    norm, query-key-value | rotary, cache | attention, its sum | output, residual | norm, gate-up, silu | down, residual

No GPU has timed them against torch's products, so they are off unless they are asked for.

This module imports Triton; CPU builds of torch come without.

Shapes: M tokens, I inputs, O outputs, E embedding width.
"""

import math
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from llama_ssp.models.linear import Linear, PlainLinear
from llama_ssp.models.llama import kernels
from llama_ssp.models.llama.gpu_layers import AddedProduct, GpuLayers, NormedProduct, Stream
from llama_ssp.models.llama.kernel_checks import check
from llama_ssp.models.triton_tools import attempt

_MOST_ROWS = 32
_CHECKED_ROWS = (1, 5, 20)
_SMALLEST_EXPONENT = -14
"""Of normal numbers in fp16."""
_PRODUCTS = ("qkv", "output", "gate_up", "down")
_Product = TypeVar("_Product", NormedProduct, AddedProduct)


def fuse(layers: GpuLayers) -> None:
    """Take our products where they can read the weights, and compute what torch's operators do on this device."""
    owners: list[tuple[str, list[Any]]] = [(name, list(layers.layers)) for name in _PRODUCTS]
    for name, group in [*owners, ("head", [layers])]:
        plain = getattr(group[0], name)
        fused: Any = FusedNormed if isinstance(plain, NormedProduct) else FusedAdded
        instead = f"continuing with torch's product instead of a fused one for {name}"
        if _reads(plain.linear) and attempt(partial(tried, fused(plain), plain, name), instead=instead):
            for owner in group:
                setattr(owner, name, fused(getattr(owner, name)))


def _reads(linear: Linear) -> bool:
    return type(linear) is PlainLinear and linear.weight_OI.dtype in {torch.float16, torch.bfloat16}


@torch.inference_mode()
def tried(fused: _Product, plain: _Product, name: str) -> _Product:
    """A fused product that is right; RuntimeError if it computes something else than the plain one."""
    assert isinstance(plain.linear, PlainLinear)
    weight_OI, generator = plain.linear.weight_OI, torch.Generator().manual_seed(0)
    for num_rows in _CHECKED_ROWS:
        x_MI = torch.randn(num_rows, weight_OI.shape[1], generator=generator).to(weight_OI)
        check(f"fused product {name}", fused.try_out(x_MI), plain.try_out(x_MI))
    return fused


class FusedNormed(NormedProduct):
    """A linear layer that computes the norm before it and the gate behind it, for few rows."""

    def __init__(self, plain: NormedProduct) -> None:
        vars(self).update(vars(plain))
        # No product of a finite x with the scaled weight overflows.
        largest = max(float(self.norm.weight_E.abs().max()), 2.0**_SMALLEST_EXPONENT)
        scale = 2.0 ** -math.ceil(math.log2(largest))
        self._norm_weight = kernels.NormWeight(self.norm.weight_E * scale, scale, self.norm.eps)

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """See `NormedProduct`."""
        if len(stream.x_ME) > _MOST_ROWS:
            return super().__call__(stream)
        linear = self.linear
        assert isinstance(linear, PlainLinear)
        return kernels.product(
            stream.x_ME, linear.weight_OI, norm=self._norm_weight, bias_O=linear.bias_O, added_MI=stream.pending_ME,
            gates=self.gates, dtype=self.dtype,
        )  # fmt: skip


class FusedAdded(AddedProduct):
    """A row-parallel linear layer that adds the residual itself, for few rows."""

    def __init__(self, plain: AddedProduct) -> None:
        vars(self).update(vars(plain))

    def _added(self, x_MI: Tensor, residual_ME: Tensor) -> Tensor:
        linear = self.linear
        assert isinstance(linear, PlainLinear)
        if len(x_MI) > _MOST_ROWS:
            return super()._added(x_MI, residual_ME)
        return kernels.product(x_MI, linear.weight_OI, bias_O=linear.bias_O, residual_MO=residual_ME)[1]

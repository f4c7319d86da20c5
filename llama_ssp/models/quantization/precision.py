"""Storage of the linear layers of a model, and of its cache.

Weights are quantized row by row, so layers with the same input may be concatenated before or after. A rank quantizes
its own slice, so slices of a row-parallel layer have their own scales. Embeddings, head, norms and biases are not
quantized. `storage.formats` has the records of formats.
"""

from dataclasses import dataclass

import torch

from llama_ssp.kernels.linear import Kernel, make_linear
from llama_ssp.storage.formats import NO_QUANTIZATION, OWN_DTYPE, format_of


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Storage of the linear layers of a model, and of its cache."""

    quantization: str = NO_QUANTIZATION
    is_stored: bool = False  # the files have packed weights, and their other weights are not quantized.
    cache_dtype: str = OWN_DTYPE  # the format of the cache, a name of `storage.formats`.

    @property
    def kernel(self) -> Kernel | None:
        """The quantizing kernel; None if weights are not quantized."""
        storage = format_of(self.quantization)
        kernel: Kernel | None = storage.load(storage.kernel)
        if not (kernel and self.is_stored):
            return kernel
        return lambda weight_OI, bias_O: (kernel if weight_OI.dtype is torch.uint8 else make_linear)(weight_OI, bias_O)

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are quantized too, so that a difference in the last bit can become a quantization step."""
        return format_of(self.quantization).rounds_inputs


UNQUANTIZED = Precision()

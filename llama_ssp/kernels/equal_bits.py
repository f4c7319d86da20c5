"""Products and attention of a device for `reproducible=true`: the bits of a row depend on no other row of a forward."""

from typing import Protocol

import torch

from llama_ssp.kernels.attention_by_length import VarlenAttention
from llama_ssp.kernels.linear import Kernel
from llama_ssp.kernels.parts import Heads, KeptRows


class EqualBits(Protocol):
    """Makes the operators of one model; see `operators`.

    Attributes:
        holds: whether all operators that were requested so far have equal bits.
    """

    holds: bool

    def kernel(self, make: Kernel | None) -> Kernel:
        """The kernel of layers that `make` would make; None stands for the fastest of unquantized weights."""

    def attention(
        self, heads: Heads, *, device: torch.device, dtype: torch.dtype, has_windows: bool, kept: KeptRows
    ) -> VarlenAttention | None:
        """Attention by lengths of rows, for any number of queries; None if it does not work on this device."""

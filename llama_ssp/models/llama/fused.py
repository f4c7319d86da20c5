"""Elementwise parts of a layer, each compiled into one GPU kernel.

On the CPU they run uncompiled: compiling there would need a compiler on the machine.

Shapes: M tokens, X heads, D head dim, P = D / 2 pairs of dimensions, U MLP units.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.models.triton_tools import warn

_Part = Callable[..., Tensor]

_MOST_VARIANTS = 64
"""Each dtype, head shape, and one token or many is compiled once; torch's default limit is 8."""


class Fused:
    """A function of tensors that is compiled at its first call on a GPU.

    If compilation fails it logs one warning and runs uncompiled. A captured graph holds only the compiled kernel, not
    the Python overhead of finding it.

    Args:
        function: its first argument decides the device.
        compiler: None for `torch.compile`.
        device: type of device to compile for.
    """

    def __init__(
        self, function: _Part, *, compiler: Callable[[_Part], _Part] | None = None, device: str = "cuda"
    ) -> None:
        self._function = function
        self._compiler = compiler or torch.compile
        self._compiled: _Part | None = None
        self._device = device

    @property
    def is_compiled(self) -> bool:
        """Whether it has been called on its device and runs compiled."""
        return self._compiled not in {None, self._function}

    def __call__(self, *arguments: Any) -> Tensor:  # noqa: ANN401 - those of the function
        """Call the function."""
        if arguments[0].device.type != self._device:
            return self._function(*arguments)
        from torch import _dynamo  # noqa: PLC0415 - takes a second to import, and only GPUs need it
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415

        try:
            _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, _MOST_VARIANTS)
            self._compiled = self._compiled or self._compiler(self._function)
            return self._compiled(*arguments)
        except (TorchDynamoException, ImportError) as error:  # raised before anything has run
            warn("continuing without compiled kernels", error)
            self._compiled = self._function
            return self._function(*arguments)


def _gated(gate_up_M2U: Tensor) -> Tensor:
    gate_MU, up_MU = gate_up_M2U.chunk(2, dim=-1)
    return functional.silu(gate_MU).mul_(up_MU)


def _turn_pairs(heads_MXD: Tensor, turns_M1P2: Tensor, num_turned: int) -> Tensor:
    # Out of place, because an in-place rotation would not fuse into one kernel.
    num_heads, head_dim = heads_MXD.shape[1:]
    in_fp32_MXD = heads_MXD.float()
    others_MXD = in_fp32_MXD.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    cos_M1D, sin_M1D = (part_M1P.repeat_interleave(2, dim=-1) for part_M1P in turns_M1P2.unbind(-1))
    is_first_D = torch.arange(head_dim, device=heads_MXD.device) % 2 == 0
    turned_MXD = in_fp32_MXD * cos_M1D + others_MXD * torch.where(is_first_D, -sin_M1D, sin_M1D)
    is_turned_X1 = (torch.arange(num_heads, device=heads_MXD.device) < num_turned)[:, None]
    return torch.where(is_turned_X1, turned_MXD, in_fp32_MXD).to(heads_MXD.dtype)


gated = Fused(_gated)
"""silu(gate) * up of the concatenated gate and up (M, 2 U); returns (M, U)."""
apply_rotary = Fused(_turn_pairs)
"""Rotate adjacent pairs of dimensions of the first heads of (M, X, D), in fp32, by cosines and sines (M, 1, P, 2)."""

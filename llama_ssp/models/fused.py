"""Elementwise parts of a layer, compiled into one kernel each on a GPU, where each operator would be one by itself.

On the CPU they are called as they stand: nothing is gained there without a compiler on the machine.

Shapes: M tokens, X heads, D head dim, P = D / 2 pairs of dimensions, U MLP units.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_log = logging.getLogger(__name__)


class Fused:
    """A function of tensors that is compiled for GPUs when it is first called there.

    Where that fails it goes on as it stands, with one warning. A graph that is captured holds the compiled kernel, and
    nothing of what Python does to find it.

    Args:
        function: its first argument decides the device.
        compiler: of functions; None for `torch.compile`.
        device: kind of device that is compiled for.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        compiler: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None,
        device: str = "cuda",
    ) -> None:
        self._function = function
        self._compiler = compiler or torch.compile
        self._compiled: Callable[..., Tensor] | None = None
        self._device = device

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Call it."""
        if tensors[0].device.type != self._device:
            return self._function(*tensors)
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - a second of imports, for GPUs alone

        try:
            self._compiled = self._compiled or self._compiler(self._function)
            return self._compiled(*tensors)
        except (TorchDynamoException, ImportError) as error:  # raised before anything has run
            reason = str(error).strip().partition("\n")[0]
            _log.warning("going on without compiled kernels: %s", reason)
            self._compiled = self._function
            return self._function(*tensors)


def _gated(gate_up_M2U: Tensor) -> Tensor:
    gate_MU, up_MU = gate_up_M2U.chunk(2, dim=-1)
    return functional.silu(gate_MU).mul_(up_MU)


def _turn_pairs(heads_MXD: Tensor, turns_M1P2: Tensor) -> Tensor:
    one_MXP, other_MXP = heads_MXD.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos_M1P, sin_M1P = turns_M1P2.unbind(-1)
    turned_MXP2 = torch.stack(
        [one_MXP * cos_M1P - other_MXP * sin_M1P, one_MXP * sin_M1P + other_MXP * cos_M1P], dim=-1
    )
    return heads_MXD.copy_(turned_MXP2.flatten(-2))


gated = Fused(_gated)
"""silu(gate) * up, of gate and up side by side (M, 2 U); returns (M, U)."""
turn_pairs_ = Fused(_turn_pairs)
"""Turn adjacent pairs of dimensions of heads (M, X, D) in place, in fp32, by cosines and sines (M, 1, P, 2)."""

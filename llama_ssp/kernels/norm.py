"""The root-mean-square norm; `cpu.linear` and `between_gpu` compute it with what stands around it.

Shapes: E width of what is normalized.
"""

import torch
from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """The root-mean-square norm over the last dimension.

    torch has one operator for it on a GPU only. In fp32 on the CPU, where each small operator costs as much as the
    arithmetic, the vector's length is used: x / sqrt(mean(x^2) + eps) = sqrt(E) x / hypot(|x|, sqrt(E eps)).

    Attributes:
        weight_E: with `by_length` times sqrt(E).
        least_square: E eps.
    """

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        weight_E, width, self.eps = weight_E.detach(), weight_E.shape[0], eps
        self.by_length = weight_E.device.type == "cpu" and weight_E.dtype == torch.float32
        self.weight_E = weight_E * width**0.5 if self.by_length else weight_E
        self.least_square = width * self.eps
        self._least_length = weight_E.new_tensor(self.least_square**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x (..., E)."""
        if not self.by_length:
            return functional.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least_length)
        return (x / lengths).mul_(self.weight_E)

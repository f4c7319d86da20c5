"""Experts of a module of transformers, each with the linear layers of `kernels.linear`: quantized ones, and on CPUs.

Only experts that some token chose are read. On a GPU without quantization the library's grouped products stay.

Shapes: M tokens, X experts, K of them that a token chose, E the model's width, I units of an expert, R tokens of one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.kernels.linear import Kernel, make_linear


def can_be_own(module: Any) -> bool:  # noqa: ANN401 - any module
    """Whether a module holds experts with a gate, as (X, 2 I, E) and (X, E, I) or transposed, and nothing behind."""
    has_gate = getattr(module, "has_gate", False) and hasattr(module, "gate_up_proj")
    return bool(has_gate) and not getattr(module, "has_post_expert_norm", False)


class OwnExperts(nn.Module):
    """Takes the weights out of a module of experts, for which `can_be_own` holds, and leaves it empty.

    Args:
        module: whole, or with this rank's units of each expert.
        kernel: of the linear layers; None takes the fastest for each shape.
    """

    def __init__(self, module: Any, kernel: Kernel | None) -> None:  # noqa: ANN401 - of transformers
        super().__init__()
        self._gate = module._apply_gate
        self._forward_hooks = module._forward_hooks  # which add up what the ranks compute

        def taken(name: str) -> list[Any]:
            weights, biases = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
            delattr(module, name)
            weights = weights.transpose(1, 2) if module.is_transposed else weights
            return [
                make_linear(
                    weight_OI.clone(memory_format=torch.contiguous_format),
                    None if biases is None else biases[number], kernel=kernel,
                )
                for number, weight_OI in enumerate(weights)
            ]  # fmt: skip

        self._gate_up, self._down = taken("gate_up_proj"), taken("down_proj")

    def forward(self, x_ME: Tensor, chosen_MK: Tensor, weights_MK: Tensor) -> Tensor:
        """Add up what the chosen experts compute, weighted; experts of a token are added in their order."""
        y_ME = torch.zeros_like(x_ME)
        for expert in chosen_MK.unique().tolist():
            if expert >= len(self._down):
                continue
            tokens_R, places_R = (chosen_MK == expert).nonzero(as_tuple=True)
            gated_RI = self._gate(self._gate_up[expert](x_ME[tokens_R]))
            part_RE = self._down[expert](gated_RI) * weights_MK[tokens_R, places_R, None]
            y_ME.index_add_(0, tokens_R, part_RE.to(y_ME.dtype))
        return y_ME

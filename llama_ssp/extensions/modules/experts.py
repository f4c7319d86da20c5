"""Experts of a module of transformers, each with the linear layers of `kernels.linear`: quantized ones, and on CPUs.

Only experts that some token chose are read. On a GPU without quantization the library's grouped products stay.

Shapes: M tokens, X experts, K of them that a token chose, E the model's width, I units of an expert, R tokens of one,
P pairs of a token and an expert.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.architectures.matrices import distinct
from llama_ssp.kernels.linear import Kernel, native_of
from llama_ssp.models.quantization.weight_only import JoinedExperts, join_experts
from llama_ssp.storage.formats import FEW_ROWS
from llama_ssp.types import LibraryPart


def can_be_own(module: LibraryPart) -> bool:
    """Whether a module holds experts with a gate, as (X, 2 I, E) and (X, E, I) or transposed, and no norm after."""
    has_gate = getattr(module, "has_gate", False) and hasattr(module, "gate_up_proj")
    return bool(has_gate) and not getattr(module, "has_post_expert_norm", False)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """All modules of experts, by name."""
    for name, module in model.named_modules():
        if isinstance(module, OwnExperts) or isinstance(getattr(module, "down_proj", None), nn.Parameter):
            yield name, module


def _is_silu(gate: Callable[[Tensor], Tensor]) -> bool:
    """Whether a gate is silu(gate) * up, as in the compiled product."""
    gated_1I = torch.arange(-4.0, 4.0)[None]
    gate_1I, up_1I = gated_1I.chunk(2, 1)
    return torch.allclose(gate(gated_1I), functional.silu(gate_1I) * up_1I)


class ExpertCounter:
    """Counts the distinct experts that forwards read, on the device and at fixed addresses, as graphs need it.

    Attributes:
        sums_3: experts of all layers and forwards, experts expected if tokens choose evenly, and layers.
        num_experts: number of experts of a layer; 0 for a model without experts.
    """

    num_experts = 0

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.sums_3 = torch.zeros(3, dtype=torch.float64, device=device)
        self._chosen: list[Tensor] = []  # (M, K) by layer.
        for _, module in experts_of(model):
            self.num_experts = getattr(module, "num_routed", module.num_experts)
            module.register_forward_pre_hook(self._keep, prepend=True)

    def _keep(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) > 1:  # a few families route before
            self._chosen.append(args[1])

    def begin(self) -> None:
        """Forget what the layers of the last forward have chosen."""
        self._chosen.clear()

    def share(self, other: "ExpertCounter") -> None:
        """Record what layers choose in another counter's tensors; that counter's forwards clear them."""
        self._chosen = other._chosen

    def count(self) -> None:
        """Count what the layers of a forward have chosen."""
        if chosen := self._chosen:
            chosen_LX = torch.stack([chosen_MK.flatten().to(self.sums_3.device) for chosen_MK in chosen])
            (num_layers, _), (num_tokens, num_chosen) = chosen_LX.shape, chosen[0].shape
            is_read_LX = chosen_LX.new_zeros(num_layers, self.num_experts).scatter_(1, chosen_LX, 1)
            self.sums_3[0].add_(is_read_LX.sum())
            self.sums_3[1].add_(num_layers * distinct(self.num_experts, num_chosen, num_tokens))
            self.sums_3[2].add_(num_layers)


class OwnExperts(nn.Module):
    """Takes the weights out of a module of experts, for which `can_be_own` holds, and leaves it empty.

    Args:
        module: the full module, or one with this rank's units of each expert.
        kernel: the kernel of the linear layers.
    """

    _in_round = True

    def __init__(self, module: LibraryPart, kernel: Kernel) -> None:
        super().__init__()
        self._gate = module._apply_gate
        # They leave experts to other ranks, and add up what the ranks compute.
        self._forward_pre_hooks, self._forward_hooks = module._forward_pre_hooks, module._forward_hooks

        dtype = getattr(module, "gate_up_proj_bias", module.down_proj).dtype  # of biases; the gate still holds `module`

        def taken(name: str) -> list[Any]:
            weights, biases = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
            delattr(module, name)
            if biases is not None:
                delattr(module, f"{name}_bias")
            turns = module.is_transposed and weights.dtype is not torch.uint8  # packed ones have their outputs first
            weights = weights.transpose(1, 2) if turns else weights
            biases = [None] * len(weights) if biases is None else biases.detach().to(dtype)
            return [
                kernel(weight_OI.clone(memory_format=torch.contiguous_format), bias_O)
                for weight_OI, bias_O in zip(weights, biases, strict=True)
            ]

        gates = module.down_proj.dtype is torch.float32 and _is_silu(self._gate)
        self._gate_up, self._down = taken("gate_up_proj"), taken("down_proj")
        gate_up, down = join_experts(self._gate_up), join_experts(self._down)
        self._of_few = (gate_up, down) if gate_up and down else None
        self.num_experts = len(self._down)
        self.num_routed = getattr(module, "num_routed", self.num_experts)
        natives = [native for linear in self._gate_up if (native := native_of(linear))] if gates else []
        self._fused = natives == self._gate_up and all(
            native.take_in(torch.empty(0), 0.0, gates=True) for native in natives
        )

    def expect(self, *, in_round: bool) -> None:
        """Say whether the next forward is part of a round, which reads no value on the host."""
        self._in_round = in_round

    def forward(self, x_ME: Tensor, chosen_MK: Tensor, weights_MK: Tensor) -> Tensor:
        """Add up what the chosen experts compute, weighted; number `num_experts` stands for other ranks'."""
        if self._of_few and (self._in_round or len(x_ME) <= FEW_ROWS):
            y_PE = self._in_pieces(*self._of_few, x_ME, chosen_MK)
        else:
            y_PE = self._one_by_one(x_ME, chosen_MK)
        return (y_PE.view(*chosen_MK.shape, -1) * weights_MK[..., None]).sum(1).to(x_ME.dtype)

    def _in_pieces(self, gate_up: JoinedExperts, down: JoinedExperts, x_ME: Tensor, chosen_MK: Tensor) -> Tensor:
        """On a GPU, `FEW_ROWS` tokens at a time: without the host, so that a round may be captured."""
        pieces = []
        for x_RE, chosen_RK in zip(x_ME.split(FEW_ROWS), chosen_MK.split(FEW_ROWS), strict=True):
            chosen = gate_up.choose(chosen_RK, self.num_experts, value_bytes=x_RE.element_size())
            pieces.append(down(self._gate(gate_up(x_RE, chosen)), chosen))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _one_by_one(self, x_ME: Tensor, chosen_MK: Tensor) -> Tensor:
        chosen_P = chosen_MK.flatten()
        order_P = chosen_P.argsort()
        counts = chosen_P.bincount(minlength=self.num_experts + 1).tolist()
        *rows, elsewhere_RE = x_ME[order_P // chosen_MK.shape[1]].split(counts)
        parts = [self._of_expert(number, x_RE) for number, x_RE in enumerate(rows) if counts[number]]
        return torch.cat([*parts, torch.zeros_like(elsewhere_RE)])[order_P.argsort()]

    def _of_expert(self, number: int, x_RE: Tensor) -> Tensor:
        gate_up = self._gate_up[number]
        y_RE: Tensor = self._down[number](gate_up.fused(x_RE) if self._fused else self._gate(gate_up(x_RE)))
        return y_RE

"""A stage of a model of transformers: its layers, and modules in place of the other stages' modules.

    whole    embedding   layers 0 to 4            layers 5 to 9               norm, output
    stage 0  embedding   layers 0 to 4            passed over, first keeps    passed over
    stage 1  zeros       passed over, last hands  layers 5 to 9               norm, output

So the library's forward runs as it is, and makes masks and positions by the numbers of layers in the whole model.

Shapes: B sequences, T positions, E hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llama_ssp.architectures.family import record_of
from llama_ssp.architectures.stages import no_stages
from llama_ssp.errors import PlacementError
from llama_ssp.models.weights import Loading


class PassedOver(nn.Module):
    """Replaces a layer: returns its input, or other hidden states, in the form of its family's layers.

    With `keeps` it keeps its input, until that is `taken`.
    """

    _handed_BTE: Tensor | None = None
    _kept_BTE: Tensor | None = None

    def __init__(self, layer: nn.Module, num_values: int, *, keeps: bool) -> None:
        super().__init__()
        # A forward asks layers for their kinds.
        own = vars(self)
        own.update(
            {name: fact for name, fact in vars(layer).items() if name not in own and isinstance(fact, str | int)}
        )
        self._num_values, self._keeps = num_values, keeps

    def forward(self, hidden_states: Tensor, *_args: object, **_options: object) -> Tensor | tuple[Any, ...]:
        """See above."""
        if self._keeps:
            self._kept_BTE = hidden_states
        x_BTE = hidden_states if self._handed_BTE is None else self._handed_BTE
        return (x_BTE, *[None] * (self._num_values - 1)) if self._num_values else x_BTE

    def hand(self, states_BTE: Tensor | None) -> None:
        """Let `forward` return these states in place of its input from now on; None undoes this."""
        self._handed_BTE = states_BTE

    def taken(self) -> Tensor | None:
        """Return the kept input, and forget it."""
        kept_BTE, self._kept_BTE = self._kept_BTE, None
        return kept_BTE


class _NoEmbedding(nn.Module):
    """Replaces an embedding by zeros, whose shape does not matter for embeddings other than that of tokens."""

    zeros_E: Tensor

    def __init__(self, width: int, loading: Loading) -> None:
        super().__init__()
        zeros_E = torch.zeros(width, dtype=loading.weights_dtype, device=loading.device)
        self.register_buffer("zeros_E", zeros_E, persistent=False)

    def forward(self, ids_BT: Tensor, *_args: object, **_options: object) -> Tensor:
        """See above."""
        zeros_BTE: Tensor = self.zeros_E.expand(*ids_BT.shape, -1)
        return zeros_BTE


class _NoOutput(nn.Module):
    """Replaces the output: returns logits of no token."""

    def forward(self, x_BTE: Tensor) -> Tensor:
        """See above."""
        return x_BTE[..., :0]


def keep_stage(model: PreTrainedModel, loading: Loading, *, path: str, layers: nn.ModuleList, output: str) -> None:
    """Leave a model the modules of this rank's stage; PlacementError for a family whose layers read more than states.

    The first stage keeps what stands before its layers, the last one all that stands outside of layers but embeddings.
    `path` is the name of the `layers`, and `output` that of the output.
    """
    stage, family = loading.stage, record_of(model.config.model_type)
    if not family.has_stages or len(layers) != loading.origin.shape.num_hidden_layers:
        raise PlacementError(no_stages(family.model_type))
    embedding, is_before = model.get_input_embeddings(), True
    for name, module in list(model.named_modules()):
        is_before &= name != path
        if name.startswith(f"{path}.") or not [*module.parameters(recurse=False)]:
            continue
        other: nn.Module | None = None
        if isinstance(module, nn.Embedding) or module is embedding:
            other = None if stage.is_first else _NoEmbedding(model.config.hidden_size, loading)
        elif not (stage.is_last or (stage.is_first and is_before)):
            other = _NoOutput() if name == output else nn.Identity()
        if other is not None:
            model.set_submodule(name, other)
    for number, layer in enumerate(layers):
        if number not in stage.layers:
            keeps = number == stage.layers.stop
            layers[number] = PassedOver(layer, family.num_layer_outputs, keeps=keeps)

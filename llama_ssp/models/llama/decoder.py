"""A lean decoder for Llama-like models: the same function as transformers with less than half the operators.

It takes the weights from the modules of transformers, sharded by `tensor_parallel`, layer by layer as they are loaded,
and leaves the modules empty. Values that depend only on positions are looked up in tables.

Shapes: B sequences, T positions, M = B * T tokens, R rows that get logits, V vocabulary, E embedding width, G queries
of each key-value head, Q = T * G, S slots, U slots that are read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from llama_ssp.architectures.family import record_of
from llama_ssp.distributed.comms import Comm
from llama_ssp.models.cache import Workspace
from llama_ssp.models.cached_runner import CachedRunner
from llama_ssp.models.linear import Kernel, make_linear
from llama_ssp.models.llama.layer import Layer, RmsNorm, take
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.tensor_parallel import GatheredLinear
from llama_ssp.shapes import static_shape


def is_llama_kind(config: PretrainedConfig) -> bool:
    """Whether the lean decoder supports this model."""
    if not record_of(config.model_type).is_llama_kind or config.hidden_act != "silu":
        return False
    rope: dict[str, Any] = config.rope_parameters or {}
    return bool(rope.get("partial_rotary_factor", 1.0) == 1.0)


class _Rotations(Workspace):
    """The complex rotary factors of all positions."""

    def __init__(self, rotary: Any, *, capacity: int, device: torch.device) -> None:  # noqa: ANN401
        angles_SP = torch.arange(capacity, device=device)[:, None] * rotary.inv_freq.float()
        self.freqs_cis_S1P = torch.polar(torch.full_like(angles_SP, rotary.attention_scaling), angles_SP)[:, None]


class LeanRunner(CachedRunner):
    """A Llama-like model, or this rank's slice of it, with its static cache; see `Runner`.

    Args:
        model: of transformers, sharded by `tensor_parallel.shard`; unusable afterwards.
        comm: the ranks that share it.
        fill: loads the parameters whose names begin with a prefix; None if they are loaded.
        kernel: of all linear layers; None takes the fastest for each shape.
        precision: of the linear layers; the head keeps its dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        comm: Comm,
        fill: Callable[[str], None] | None = None,
        kernel: Kernel | None = None,
        precision: Precision = UNQUANTIZED,
    ) -> None:
        config: Any = model.config
        body: Any = model.model
        head: Any = model.lm_head
        assert is_llama_kind(config)
        fill = fill or (lambda _prefix: None)
        layers, by_position = [], precision.rounds_inputs
        for number, layer in enumerate(body.layers):
            fill(f"model.layers.{number}.")
            layers.append(Layer(layer, number, comm=comm, kernel=precision.kernel or kernel, by_position=by_position))
        fill("")
        super().__init__(config, head.weight)
        self._width: int = config.hidden_size
        self._comm = comm
        self._rotary = body.rotary_emb
        self._embed: nn.Module = body.embed_tokens
        self._layers = layers
        self._norm = RmsNorm(body.norm)
        self._head_sizes = head.sizes if isinstance(head, GatheredLinear) else (self.vocab_size,)
        is_tied = head.weight is body.embed_tokens.weight
        self._head = make_linear(*take(head), kernel=kernel, keeps_weight=is_tied)
        self.repeats_operators = not precision.rounds_inputs

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """See `Runner.allocate`."""
        known = self.num_allocations
        super().allocate(batch_size=batch_size, capacity=capacity)
        if self.num_allocations > known:
            self._rotations = _Rotations(self._rotary, capacity=capacity, device=self.device)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
    ) -> Tensor:
        """See `Runner.forward`."""
        assert self._cache is not None, "allocate comes first"
        batch_size, num_tokens = static_shape(ids_BT)
        view = self._cache.view(positions_BT, bucket=bucket, cache_rows_B=cache_rows_B)
        freqs_cis_M1P = self._rotations.freqs_cis_S1P.index_select(0, positions_BT.flatten())
        positions_BQ = positions_BT[..., None].repeat(1, 1, self._layers[0].group).flatten(1)
        masks = self._masks.rows(positions_BQ, bucket=bucket)
        x_ME = self._embed(ids_BT.flatten())
        for layer, window in zip(self._layers, self._windows, strict=True):
            x_ME = layer.forward(x_ME, freqs_cis_M1P, masks[window], view, batch_size=batch_size)
        if score_positions_BR is not None:
            x_BTE = x_ME.view(batch_size, num_tokens, -1)
            x_ME = x_BTE.gather(1, score_positions_BR[..., None].expand(-1, -1, self._width)).flatten(0, 1)
        logits_MV: Tensor = self._comm.all_gather_last(self._head(self._norm(x_ME)), self._head_sizes)
        return logits_MV.view(batch_size, -1, self.vocab_size).float()

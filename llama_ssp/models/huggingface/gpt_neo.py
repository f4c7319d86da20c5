"""GPT-Neo on the static cache: replaces the attention of transformers, which slices its own mask by length.

Every second layer sees only the latest positions. Scores are not divided by sqrt(D).

Shapes: B sequences, T positions, H query heads, D head dim, E hidden size, S slots, W windows.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llama_ssp.architectures.gpt_neo import FAMILY
from llama_ssp.errors import CheckpointError
from llama_ssp.weights.source import WeightSource


def check_positions(origin: WeightSource) -> None:
    """CheckpointError if another number of positions is stored, before a model allocates masks of that size squared."""
    wanted: int = origin.config.max_position_embeddings
    for name, tensor in origin.tensors.items():
        if name.endswith("wpe.weight") and tensor.shape[:1] != (wanted,):
            raise CheckpointError(
                f"{origin.folder} does not fit its config.json: {name} has {tensor.shape[0] if tensor.shape else 0} "
                f"rows, and config.json has max_position_embeddings={wanted}: copy or download it again"
            )


def adapt(model: PreTrainedModel) -> None:
    """Replace the attention of every layer, and clamp positions to the table of position embeddings.

    A round computes a few positions beyond the context, but their tokens are never kept.
    """
    windows = FAMILY.windows_of(model.config)
    distinct = list(dict.fromkeys(windows))
    body: Any = model.transformer
    for block, window in zip(body.h, windows, strict=True):
        block.attn.attention = StaticAttention(block.attn.attention, mask=distinct.index(window))
    last = model.config.max_position_embeddings - 1
    body.wpe.register_forward_pre_hook(lambda _table, positions: (positions[0].clamp(max=last),))
    model.config._attn_implementation = "sdpa"


class StaticAttention(nn.Module):
    """Attention with the layer's own mask, for any attention that transformers knows.

    Args:
        module: the replaced module, whose linear layers are taken over under their names.
        mask: index of this layer's mask.
    """

    def __init__(self, module: Any, *, mask: int) -> None:  # noqa: ANN401 - of transformers
        super().__init__()
        self.config = module.config
        self.layer_id: int = module.layer_id
        self.num_heads: int = module.num_heads
        self.head_dim: int = module.head_dim
        self.q_proj, self.k_proj, self.v_proj = module.q_proj, module.k_proj, module.v_proj
        self.out_proj = module.out_proj
        self._mask = mask

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, layer_past: Cache, **_options: object
    ) -> tuple[Tensor, None]:
        """Attend from hidden states (B, T, E), with masks (B, W, T, S) that are added to the scores."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            project(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for project in projections
        )
        key, value = layer_past.update(key, value, self.layer_id)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mask_B1TS = attention_mask[:, self._mask : self._mask + 1]
        attended_BTHD, _ = attend(self, query, key, value, mask_B1TS, scaling=1.0)
        return self.out_proj(attended_BTHD.flatten(-2)), None

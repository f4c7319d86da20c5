"""GPT-Neo on the static cache: its attention takes our masks, where that of transformers slices its own by length.

Every second layer sees only the latest positions. Scores are not divided by sqrt(D).

Shapes: B sequences, T positions, H query heads, D head dim, S slots, W windows.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llama_ssp.architectures.decoders import GPT_NEO
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
    windows = GPT_NEO.windows_of(model.config)
    distinct = list(dict.fromkeys(windows))
    body: Any = model.transformer
    for block, window in zip(body.h, windows, strict=True):
        attention = block.attn.attention
        attention._attn = partial(_attend, attention, distinct.index(window))
        del attention.bias  # masks of the context's size squared
    last = model.config.max_position_embeddings - 1
    body.wpe.register_forward_pre_hook(lambda _table, positions: (positions[0].clamp(max=last),))
    model.config._attn_implementation = "sdpa"


def _attend(module: Any, number: int, *qkv_and_masks: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
    """Attention (B, H, T, D) with the layer's own mask of (B, W, T, S), for any attention that transformers knows."""
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    *qkv, masks_BWTS = qkv_and_masks
    attended_BTHD, _ = attend(module, *qkv, masks_BWTS[:, number : number + 1], scaling=1.0)
    return attended_BTHD.transpose(1, 2), None

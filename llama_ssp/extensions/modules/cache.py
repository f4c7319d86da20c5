"""The cache interface of transformers over our static cache.

Shapes: B sequences, T positions, U slots that may be read, N key-value heads, D head dim, M = B * T tokens.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from llama_ssp.models.cache import CacheView
from llama_ssp.models.states import StateView


class LibraryCache(Cache):
    """The cache interface of transformers over a `StaticCache`.

    Args:
        layers: the numbers of the layers that have slots.
        of_latents: layers whose attention takes both parts of a latent as they are kept.

    Attributes:
        view, states: the views of the current forward; `states` is None without recurrent layers.
    """

    view: CacheView
    states: StateView | None = None

    def __init__(self, layers: Sequence[int], *, of_latents: Collection[int] = ()) -> None:
        super().__init__(layers=[])
        self._of_latents = of_latents
        self._places = {layer: place for place, layer in enumerate(layers)}

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._places)

    def show(self, view: CacheView, states: StateView | None) -> None:
        """Let a forward read and write this view and these states."""
        self.view, self.states = view, states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, N, T, D) of one layer; returns all that may be read, (B, N, U, D).

        They may differ in width, such as the parts of a latent.
        """
        place = self._places[layer_idx]
        is_latent = layer_idx in self._of_latents
        if is_latent or key_states.shape[-1] != value_states.shape[-1]:
            keys_MND, values_MND = (part.transpose(1, 2).flatten(0, 1) for part in (key_states, value_states))
            return self.view.update_joint(keys_MND, values_MND, place, unpacks=not is_latent)
        written_M2ND = torch.cat([key_states, value_states], dim=1).transpose(1, 2).flatten(0, 1)
        return self.view.update(written_M2ND, place)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: rows have different lengths, and positions are always given."""
        return 0

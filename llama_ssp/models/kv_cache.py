"""The static cache: one row of slots per sequence, written at per-row positions, read as far as the context reaches.

    cache row   | prompt ............ | accepted ... | drafted, not yet accepted | free ......... |
    positions   0                     P              L                           L+K              bucket
    rollback    = the next round simply writes at L again; nothing is copied, nothing is cropped

Position p of a sequence always lies in slot p of its row. What stands beyond a row's length is never read, because the
mask of `runner` shows a token only the slots up to its own position, and those have been written by then. How many
slots are needed, and how many of them a forward reads, is decided elsewhere.

Shapes: B sequences, T positions, S slots, N key-value heads, D head dim, L layers.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class _Layer:
    """The buffers of one layer, zeroed, because a masked value still takes part as 0 times itself.

    Attributes:
        key_slots, value_slots: (B * S, N, D), as they are written.
        bucket: slots of each row that the views show.
        keys_BNSD, values_BNSD: views of the first `bucket` slots, as attention reads them.
    """

    def __init__(self, key_states: Tensor, *, batch_size: int, capacity: int) -> None:
        _, num_kv_heads, _, head_dim = key_states.shape
        shape = (batch_size, capacity, num_kv_heads, head_dim)
        self._keys, self._values = (
            torch.zeros(shape, dtype=key_states.dtype, device=key_states.device) for _ in range(2)
        )
        self.key_slots, self.value_slots = self._keys.flatten(0, 1), self._values.flatten(0, 1)
        self.show(capacity)

    def show(self, bucket: int) -> None:
        """Make the views; they are kept, because the bucket seldom changes and views cost as much as the copies."""
        self.bucket = bucket
        self.keys_BNSD, self.values_BNSD = (slots[:, :bucket].transpose(1, 2) for slots in (self._keys, self._values))


class RaggedCache(Cache):
    """The library's cache interface over static buffers; each row has its own length.

    A layer's buffers are made when its first keys arrive, so that their number of heads is that of this rank.

    Args:
        num_layers: layers of the model.
        batch_size: rows.
        capacity: slots of each row.
        device: where the slot numbers are.
    """

    def __init__(self, *, num_layers: int, batch_size: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self._num_rows = batch_size
        self._num_slots = capacity
        self._layers: list[_Layer | None] = [None] * num_layers
        self._first_slot_B1 = torch.arange(batch_size, device=device)[:, None] * capacity

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def fits(self, *, batch_size: int, capacity: int) -> bool:
        """Whether it has just these rows, and slots enough."""
        return self._num_rows == batch_size and self._num_slots >= capacity

    def aim(self, positions_BT: Tensor, *, bucket: int, batch_rows_B: Tensor | None) -> None:
        """Say where the next forward writes and what it reads.

        Args:
            positions_BT: slot of each new token in its row.
            bucket: only slots below it are read.
            batch_rows_B: the row of the cache that each sequence is; None when they are all rows, in order.
        """
        first_slot_B1 = self._first_slot_B1 if batch_rows_B is None else self._first_slot_B1[batch_rows_B]
        self._slots = (first_slot_B1 + positions_BT).flatten()
        self._bucket = bucket
        self._batch_rows_B = batch_rows_B

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, N, T, D) of one layer; returns all that may be read, (B, N, bucket, D)."""
        layer = self._layers[layer_idx] or self._make_layer(layer_idx, key_states)
        layer.key_slots.index_copy_(0, self._slots, key_states.transpose(1, 2).flatten(0, 1))
        layer.value_slots.index_copy_(0, self._slots, value_states.transpose(1, 2).flatten(0, 1))
        if layer.bucket != self._bucket:
            layer.show(self._bucket)
        if self._batch_rows_B is None:
            return layer.keys_BNSD, layer.values_BNSD
        rows_B = self._batch_rows_B
        return layer.keys_BNSD.index_select(0, rows_B), layer.values_BNSD.index_select(0, rows_B)

    def _make_layer(self, layer_idx: int, key_states: Tensor) -> _Layer:
        # A tensor that was made in inference mode could not be written outside of it later on.
        with torch.inference_mode(mode=False):
            layer = _Layer(key_states, batch_size=self._num_rows, capacity=self._num_slots)
        self._layers[layer_idx] = layer
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the library's signature
        """Nothing, for the library: rows have lengths of their own, and positions are always given."""
        return 0

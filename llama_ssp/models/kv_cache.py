"""The static cache: one row of slots per sequence, written at per-row positions, read as far as the context reaches.

    cache row   | prompt ............ | accepted ... | drafted, not yet accepted | free ......... |
    positions   0                     P              L                           L+K              bucket
    rollback    = the next round simply writes at L again; nothing is copied, nothing is cropped

Position p of a sequence always lies in slot p of its row. What stands beyond a row's length is never read, because the
mask shows a token only the slots up to its own position, and those have been written by then. How many
slots are needed, and how many of them a forward reads, is decided elsewhere.

Shapes: B sequences, T positions, M = B * T tokens, S slots, N key-value heads, D head dim, L layers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class _Layer:
    """The buffer of one layer, zeroed, because a masked value still takes part as 0 times itself.

    Heads come first, so that attention reads the slots of a head in one run.

    Attributes:
        parts: (2 N, B * S, D): the keys of all heads, then their values.
        bucket: slots of each row that the views show.
        keys_BNSD, values_BNSD: views of the first `bucket` slots, as attention reads them.
    """

    def __init__(self, written_M2ND: Tensor, *, batch_size: int, capacity: int) -> None:
        _, num_parts, head_dim = written_M2ND.shape
        self._whole = written_M2ND.new_zeros(2, num_parts // 2, batch_size, capacity, head_dim)
        self.parts = self._whole.view(num_parts, batch_size * capacity, head_dim)
        self.show(capacity)

    def show(self, bucket: int) -> None:
        """Make the views; they are kept, because the bucket seldom changes and views cost as much as the copies."""
        self.bucket = bucket
        self.keys_BNSD, self.values_BNSD = self._whole[:, :, :, :bucket].transpose(1, 2).unbind()


class StaticCache:
    """Keys and values of all layers on this rank; each row has its own length.

    A layer's buffer is made when its first keys arrive, with this rank's number of heads, on the layer's device.

    Args:
        num_layers: layers of the model.
        batch_size: rows.
        capacity: slots of each row.
        device: where the slot numbers are.
    """

    def __init__(self, *, num_layers: int, batch_size: int, capacity: int, device: torch.device) -> None:
        self._num_rows = batch_size
        self._num_slots = capacity
        self._layers: list[_Layer | None] = [None] * num_layers
        self._first_slot_B1 = torch.arange(batch_size, device=device)[:, None] * capacity

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Size of the buffers that have been made."""
        return sum(layer.parts.nbytes for layer in self._layers if layer)

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
        self._slots_M = (first_slot_B1 + positions_BT).flatten()
        self._bucket = bucket
        self._batch_rows_B = batch_rows_B

    def update(self, written_M2ND: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Write what a layer made of the new tokens, and show all that they may read.

        Args:
            written_M2ND: keys of all heads, then their values.
            number: which layer it is.

        Returns:
            Keys and values, each (B, N, bucket, D).
        """
        layer = self._layers[number] or self._make_layer(number, written_M2ND)
        layer.parts.index_copy_(1, self._slots_M.to(written_M2ND.device), written_M2ND.transpose(0, 1))
        if layer.bucket != self._bucket:
            layer.show(self._bucket)
        if self._batch_rows_B is None:
            return layer.keys_BNSD, layer.values_BNSD
        rows_B = self._batch_rows_B.to(written_M2ND.device)
        return layer.keys_BNSD.index_select(0, rows_B), layer.values_BNSD.index_select(0, rows_B)

    def _make_layer(self, number: int, written_M2ND: Tensor) -> _Layer:
        # A tensor that was made in inference mode could not be written outside of it later on.
        with torch.inference_mode(mode=False):
            layer = _Layer(written_M2ND, batch_size=self._num_rows, capacity=self._num_slots)
        self._layers[number] = layer
        return layer


class LibraryCache(Cache):
    """The library's cache interface over a `StaticCache`."""

    def __init__(self, static: StaticCache) -> None:
        super().__init__(layers=[])
        self._static = static

    def __len__(self) -> int:
        """Number of layers."""
        return self._static.num_layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, N, T, D) of one layer; returns all that may be read, (B, N, bucket, D)."""
        written_M2ND = torch.cat([key_states, value_states], dim=1).transpose(1, 2).flatten(0, 1)
        return self._static.update(written_M2ND, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the library's signature
        """Nothing, for the library: rows have lengths of their own, and positions are always given."""
        return 0


class CausalMask:
    """What attention adds to the scores: 0 for slots up to a token's own position, minus infinity beyond.

    The rows of all positions are pieces of one line of 2 S numbers, so that a row is looked up, and never computed.

        line              | 0 0 0 0 - - - - |      position 3 reads from 0, position 0 from 3: | 0 - - - |
        a window of two   | - - 0 0 - - - - |      position 3: | - - 0 0 |

    Args:
        capacity: S.
        window: how many positions a token sees, its own included; None for all.
        dtype: that of the scores.
        device: where they are.
    """

    def __init__(self, capacity: int, *, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        line = torch.zeros(2 * capacity, dtype=dtype, device=device)
        line[capacity:] = float("-inf")
        if window is not None:
            line[: max(capacity - window, 0)] = float("-inf")
        self._pieces_SS = line.as_strided((capacity, capacity), (1, 1))
        self._last = capacity - 1

    def rows(self, positions_M: Tensor, *, bucket: int) -> Tensor:
        """The masks (M, bucket) of tokens at these positions."""
        return self._pieces_SS[:, :bucket].index_select(0, self._last - positions_M)


class Masks:
    """The masks of all layers of a model: one for each window that any of them has.

    Args:
        windows: those of the layers.
        capacity: S.
        dtype: that of the scores.
        device: where they are.
    """

    def __init__(
        self, windows: Iterable[int | None], *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._of = {window: CausalMask(capacity, window=window, dtype=dtype, device=device) for window in windows}

    def rows(self, positions_BT: Tensor, *, bucket: int) -> dict[int | None, Tensor]:
        """The masks (B, 1, T, bucket) of tokens at these positions, by window, in the order of the layers."""
        positions_M, sizes = positions_BT.flatten(), (positions_BT.shape[0], 1, -1, bucket)
        return {window: mask.rows(positions_M, bucket=bucket).view(sizes) for window, mask in self._of.items()}

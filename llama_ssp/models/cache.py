"""The static cache: one row of slots per sequence, written at per-row positions, read as far as the context reaches.

    cache row   | prompt ............ | accepted ... | drafted, not yet accepted | free ......... |
    positions   0                     P              L                           L+K              bucket
    rollback    = the next round simply writes at L again; nothing is copied, nothing is cropped

Position p of a sequence always lies in slot p of its row. What stands beyond a row's length is never read, because the
mask shows a token only the slots up to its own position, and those have been written by then. How many
slots are needed, and how many of them a forward reads, is decided elsewhere.

Shapes: B sequences, T positions, M = B * T tokens, S slots, U slots that are read, N key-value heads, D head dim.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from llama_ssp.shapes import static_shape

_T = TypeVar("_T")


class Workspace:
    """Base of what `allocate` makes: its tensors are others after the next `allocate`, while weights stay."""


class PerBucket(dict[int, _T], Generic[_T]):
    """What is read at each width of the cache.

    It is made once for each, because views cost as much as copies, and widths are few.

    Args:
        make: makes it for a width; None if that is not possible yet.
    """

    def __init__(self, make: Callable[[int], _T | None]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, bucket: int) -> _T | None:
        """Make what is read at this width."""
        made = self._make(bucket)
        if made is not None:
            self[bucket] = made
        return made


class LayerBuffer(NamedTuple):
    """One layer's part of the cache: the same memory as it is written, and as far as it is read.

    Attributes:
        parts: (2 N, B * S, D): the keys of all heads, then their values; heads come first, so that attention reads the
            slots of a head in one run.
        keys_BNUD: the keys of the slots that are read.
        values_BNUD: the values there.
    """

    parts: Tensor
    keys_BNUD: Tensor
    values_BNUD: Tensor


class StaticCache(Workspace):
    """Keys and values of all layers on this rank; each row has its own length.

    A layer's buffer is made when its first keys arrive, with this rank's number of heads, on the layer's device. It
    begins as zeros, because a masked value still takes part as 0 times itself.

    Args:
        num_layers: layers of the model.
        batch_size: rows.
        capacity: slots of each row.
        device: where the slot numbers are.

    Attributes:
        first_slot_B1: where each row begins when the slots of all rows are counted through.
        shown: the buffers of all layers, by how many of their slots are read; None before all have been written.
    """

    def __init__(self, *, num_layers: int, batch_size: int, capacity: int, device: torch.device) -> None:
        self._num_rows = batch_size
        self._num_slots = capacity
        self._wholes: list[Tensor | None] = [None] * num_layers
        self.shown = PerBucket(self._show_all)
        self.first_slot_B1 = torch.arange(batch_size, device=device)[:, None] * capacity

    @property
    def num_bytes(self) -> int:
        """Size of the buffers that have been made."""
        return sum(whole.nbytes for whole in self._wholes if whole is not None)

    def fits(self, *, batch_size: int, capacity: int) -> bool:
        """Whether it has just these rows, and slots enough."""
        return self._num_rows == batch_size and self._num_slots >= capacity

    def aim(self, positions_BT: Tensor, *, bucket: int, cache_rows_B: Tensor | None) -> "CacheView":
        """Say where a forward writes and what it reads: the first `bucket` slots; see `CacheView`."""
        shown = self.shown[bucket]

        def buffer(number: int, written_M2ND: Tensor) -> LayerBuffer:
            if shown:
                return shown[number]
            whole = self._wholes[number]
            return self._show(self._make(number, written_M2ND) if whole is None else whole, bucket)

        return CacheView(buffer, self.first_slot_B1, positions_BT, cache_rows_B=cache_rows_B)

    def _show_all(self, bucket: int) -> Sequence[LayerBuffer] | None:
        wholes = [whole for whole in self._wholes if whole is not None]
        return [self._show(whole, bucket) for whole in wholes] if len(wholes) == len(self._wholes) else None

    def _show(self, whole: Tensor, bucket: int) -> LayerBuffer:
        return LayerBuffer(whole.flatten(2, 3).flatten(0, 1), *whole[:, :, :, :bucket].transpose(1, 2).unbind())

    def _make(self, number: int, written_M2ND: Tensor) -> Tensor:
        _, num_parts, head_dim = written_M2ND.shape
        # A tensor that was made in inference mode could not be written outside of it later on.
        with torch.inference_mode(mode=False):
            whole = written_M2ND.new_zeros(2, num_parts // 2, self._num_rows, self._num_slots, head_dim)
        self._wholes[number] = whole
        return whole


class CacheView:
    """Where one forward writes in a cache, and what it reads.

    Args:
        buffer: gives that of a layer by its number, for the keys and values that will be written.
        first_slot_B1: see `StaticCache`.
        positions_BT: slot of each new token in its row.
        cache_rows_B: the row of the cache that each sequence is; None when they are all rows, in order.
    """

    def __init__(
        self,
        buffer: Callable[[int, Tensor], LayerBuffer],
        first_slot_B1: Tensor,
        positions_BT: Tensor,
        *,
        cache_rows_B: Tensor | None,
    ) -> None:
        if cache_rows_B is not None:
            first_slot_B1 = first_slot_B1[cache_rows_B]
        self._buffer = buffer
        self._slots_M = (first_slot_B1 + positions_BT).flatten()
        self._batch_rows_B = cache_rows_B

    def update(self, written_M2ND: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Write what a layer made of the new tokens, and show all that they may read.

        Args:
            written_M2ND: keys of all heads, then their values.
            number: which layer it is.

        Returns:
            Keys and values, each (B, N, U, D).
        """
        parts, keys_BNUD, values_BNUD = self._buffer(number, written_M2ND)
        parts.index_copy_(1, self._slots_M.to(written_M2ND.device), written_M2ND.transpose(0, 1))
        if self._batch_rows_B is None:
            return keys_BNUD, values_BNUD
        rows_B = self._batch_rows_B.to(written_M2ND.device)
        return keys_BNUD.index_select(0, rows_B), values_BNUD.index_select(0, rows_B)


class LibraryCache(Cache):
    """The library's cache interface over a `StaticCache`.

    Args:
        num_layers: layers of the model.

    Attributes:
        aim: where the forward at hand writes, and what it reads.
    """

    aim: CacheView

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self._num_layers = num_layers

    def __len__(self) -> int:
        """Number of layers."""
        return self._num_layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, N, T, D) of one layer; returns all that may be read, (B, N, U, D)."""
        written_M2ND = torch.cat([key_states, value_states], dim=1).transpose(1, 2).flatten(0, 1)
        return self.aim.update(written_M2ND, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the library's signature
        """Nothing, for the library: rows have lengths of their own, and positions are always given."""
        return 0


def causal_pieces(capacity: int, *, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What attention adds to the scores: 0 for slots up to a token's own position, minus infinity beyond.

    The rows of all positions are pieces of one line of 2 S numbers, so that a row is looked up, and never computed.

        line              | 0 0 0 0 - - - - |      position 3 reads from 0, position 0 from 3: | 0 - - - |
        a window of two   | - - 0 0 - - - - |      position 3: | - - 0 0 |

    Args:
        capacity: S.
        window: how many positions a token sees, its own included; None for all.
        dtype: that of the scores.
        device: where they are.

    Returns:
        The pieces (S, S), that of the last position first.
    """
    line = torch.zeros(2 * capacity, dtype=dtype, device=device)
    line[capacity:] = float("-inf")
    if window is not None:
        line[: max(capacity - window, 0)] = float("-inf")
    return line.as_strided((capacity, capacity), (1, 1))


class Masks(Workspace):
    """The masks of all layers of a model: one for each window that any of them has.

    Args:
        windows: those of the layers.
        capacity: S.
        dtype: that of the scores.
        device: where they are.

    Attributes:
        last: S - 1, of no dimension.
        shown: the pieces of the first slots, by their number, then by window in the order of the layers.
    """

    def __init__(
        self, windows: Iterable[int | None], *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._of = {
            window: causal_pieces(capacity, window=window, dtype=dtype, device=device)
            for window in dict.fromkeys(windows)
        }
        self.shown = PerBucket(self._show)
        self.last = torch.tensor(capacity - 1, device=device)

    def _show(self, bucket: int) -> dict[int | None, Tensor]:
        return {window: pieces_SS[:, :bucket] for window, pieces_SS in self._of.items()}

    def rows(self, positions_BT: Tensor, *, bucket: int) -> dict[int | None, Tensor]:
        """The masks (B, 1, T, bucket) of tokens at these positions, by window, in the order of the layers."""
        batch_size, _ = static_shape(positions_BT)
        rows_M = (self.last - positions_BT).flatten()
        return {
            window: pieces_SU.index_select(0, rows_M).unflatten(0, (batch_size, 1, -1))
            for window, pieces_SU in self.shown[bucket].items()
        }

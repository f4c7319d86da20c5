"""The static cache: one row of slots per sequence, written at per-row positions, read up to a bucket.

    cache row   | prompt ............ | accepted ... | drafted, not yet accepted | free ......... |
    positions   0                     P              L                           L+K              bucket
    rollback    = the next round writes at L again; nothing is copied or cropped

Position p of a sequence is always in slot p of its row. Slots beyond a row's length are never read, because the mask
shows a token only the slots up to its own position, which have been written by then. Module `prefill` chooses the
buckets. Attention that reads rows by their lengths (module `llama.attention`) gets the slots of all rows.

A key or value of a head is kept as a format of `storage.formats` says, and is written and read through
`kernels.parts`; compiled attention, and kernels of GPUs, read it as it is.

Shapes: B sequences, T positions, M = B * T tokens, S slots, U slots that are read, N key-value heads, D head dim, W
width of a kept key or value.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llama_ssp.architectures.engine import PREFILL_CHUNK, saves_states
from llama_ssp.architectures.family import Chunk, num_positions, record_of, with_slots
from llama_ssp.kernels.parts import KeptRows, rows_of
from llama_ssp.models.graph_inputs import PerBucket, Workspace
from llama_ssp.models.states import LayerState, StateCache
from llama_ssp.ranks.comms import Comm, Reads
from llama_ssp.storage.formats import OWN_DTYPE


class LayerBuffer(NamedTuple):
    """One layer's part of the cache: views of one memory for writing and for reading.

    Attributes:
        parts: (2 N, B * S, W) for writing: the keys of all heads, then their values. Heads come first, so that the
            slots of a head are contiguous. (N, B * S, W) if keys and values are kept next to each other in a slot.
        keys, values: (B, N, U, W) of the slots that are read; if rows are read by length, all slots (B * S, N, W).
    """

    parts: Tensor
    keys: Tensor
    values: Tensor

    def rows(self, cache_rows_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """The kept keys and values of some rows; None for all of them."""
        if cache_rows_B is None:
            return self.keys, self.values
        rows_B = cache_rows_B.to(self.keys.device)
        return self.keys.index_select(0, rows_B), self.values.index_select(0, rows_B)


class StaticCache(Workspace):
    """Keys and values of all layers on this rank; each row has its own length.

    A layer's buffer is made when its first keys arrive, with this rank's number of heads, on the layer's device. It
    starts as zeros, because a masked value is still multiplied by 0.

    Args:
        kept: how keys and values are kept.
        reads_by_length: forwards read rows by their lengths.

    Attributes:
        num_layers: layers with keys and values.
        num_rows, num_slots: B and S.
        shown: the buffers of all layers, by bucket; None before all have been written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        capacity: int,
        device: torch.device,
        kept: KeptRows,
        reads_by_length: bool = False,
    ) -> None:
        self.num_layers, self.num_rows, self._kept = num_layers, batch_size, kept
        self._reads_by_length = reads_by_length
        self.num_slots = capacity
        self._wholes: list[Tensor | None] = [None] * num_layers
        self.shown = PerBucket(self._show_all)
        self.shown_in_rows = PerBucket(partial(self._show_all, in_rows=True))
        self._first_slot_B1 = torch.arange(batch_size, device=device)[:, None] * self.num_slots

    def view(
        self, positions_BT: Tensor, *, bucket: int, cache_rows_B: Tensor | None, in_rows: bool = False
    ) -> "CacheView":
        """Make the view of one forward, which writes these slots of each row and reads the first `bucket`.

        With `in_rows`, a cache that is read by length is read like any other.
        """
        slots_M = self._slots(positions_BT, cache_rows_B)
        rows_B = None if self._reads_by_length else cache_rows_B
        return CacheView(self.buffers(bucket, in_rows=in_rows), slots_M, rows_B, self._kept)

    def _slots(self, slots_BT: Tensor, cache_rows_B: Tensor | None) -> Tensor:
        """Number some slots of each row among the slots of all rows, (M,); for the rows see `Runner.forward`."""
        first_B1 = self._first_slot_B1 if cache_rows_B is None else self._first_slot_B1.index_select(0, cache_rows_B)
        return (first_B1 + slots_BT).flatten()

    def move(self, from_BD: Tensor, to_BD: Tensor, cache_rows_B: Tensor | None = None) -> None:
        """See `Runner.move`."""
        from_M, to_M = (self._slots(slots_BD, cache_rows_B) for slots_BD in (from_BD, to_BD))
        for whole in self._wholes:
            assert whole is not None, "a forward comes first"
            parts = whole.flatten(2, 3).flatten(0, 1)
            parts.index_copy_(1, to_M.to(parts.device), parts.index_select(1, from_M.to(parts.device)))

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int) -> None:
        """Copy keys and values of the first slots of a row to other rows.

        Rows share no memory, because kernels read a row as one piece of memory, and copying a token takes a hundredth
        of the time that the model needs to read it.
        """
        for whole in self._wholes:
            assert whole is not None, "a forward comes first"
            held = whole[:, :, from_row, :num_tokens]
            for row in to_rows:
                whole[:, :, row, :num_tokens].copy_(held)

    def in_rows(self) -> Iterator[Tensor]:
        """Keys and values of each layer so far, (2 N, B, S, W)."""
        for whole in self._wholes:
            if whole is not None:
                yield whole.flatten(0, 1)

    def clear(self, row: int) -> None:
        """Overwrite a row by zeros: NaN would affect the next text there, since a masked value is multiplied by 0."""
        for whole in self._wholes:
            if whole is not None:
                whole[:, :, row].zero_()

    def take(self, other: "StaticCache") -> None:
        """Take over the contents of a smaller cache with as many rows, layer by layer, and empty that cache."""
        other.shown.clear()
        other.shown_in_rows.clear()
        for number, whole in enumerate(other._wholes):
            if whole is not None:
                own = self._zeros(number, whole.device, heads=whole.shape[:2], width=whole.shape[-1])
                own[:, :, :, : other.num_slots].copy_(whole)
                other._wholes[number] = None

    def make_buffers(self, layers: Collection[int], device: torch.device, *, num_heads: int, head_dim: int) -> None:
        """Make the buffers of some layers before keys arrive, unless they exist; other layers get no slots."""
        for number, whole in enumerate(self._wholes):
            if whole is None:
                num_slots = None if number in layers else 0
                width = self._kept.width(head_dim)
                self._zeros(number, device, heads=(2, num_heads), width=width, num_slots=num_slots)

    @property
    def is_complete(self) -> bool:
        """Whether it has the buffers of all layers."""
        return all(whole is not None for whole in self._wholes)

    def make_like(self, other: "StaticCache", layers: Collection[int]) -> None:
        """Make the buffers of some layers with the heads of another cache; other layers get no slots."""
        for number, whole in enumerate(other._wholes):
            assert whole is not None, "it is complete"
            num_slots = None if number in layers else 0
            self._zeros(number, whole.device, heads=whole.shape[:2], width=whole.shape[-1], num_slots=num_slots)

    def take_slots(self, other: "StaticCache", from_BC: Tensor, cache_rows_B: Tensor | None = None) -> None:
        """Copy some slots of each row of another cache to the same row's first slots here, in layers with slots."""
        layers = [number for number, own in enumerate(self._wholes) if own is not None and own.shape[3]]
        to_BC = torch.arange(from_BC.shape[1], device=from_BC.device).expand_as(from_BC)
        self.put_slots(to_BC, layers, other.slots(from_BC, layers, cache_rows_B), cache_rows_B)

    def slots(self, slots_BT: Tensor, layers: Collection[int], cache_rows_B: Tensor | None = None) -> list[Tensor]:
        """Read some slots of each row: (2 N, B * T, W) of each of these layers."""
        slots_M = self._slots(slots_BT, cache_rows_B)
        return [parts.index_select(1, slots_M.to(parts.device)) for parts in self._parts_of(layers)]

    def put_slots(
        self, slots_BT: Tensor, layers: Collection[int], held: Sequence[Tensor], cache_rows_B: Tensor | None = None
    ) -> None:
        """Write back what `slots` has returned, to the same slots or to others."""
        slots_M = self._slots(slots_BT, cache_rows_B)
        for parts, held_2NMW in zip(self._parts_of(layers), held, strict=True):
            parts.index_copy_(1, slots_M.to(parts.device), held_2NMW)

    def _parts_of(self, layers: Collection[int]) -> Iterator[Tensor]:
        for number in layers:
            whole = self._wholes[number]
            assert whole is not None, "a forward, or `make_buffers`, comes first"
            yield whole.flatten(2, 3).flatten(0, 1)

    def buffers(self, bucket: int, *, in_rows: bool = False) -> "BufferOf":
        """Return a function from a layer's number, and a source of its new keys and values, to the layer's buffer.

        The keys and values are (M, 2 N, D); if they are kept next to each other in a slot, (M, 1, N, W) as they are
        kept.
        """
        bucket = self.num_slots if self._reads_by_length and not in_rows else bucket
        shown = (self.shown_in_rows if in_rows else self.shown)[bucket]

        def buffer(number: int, written_M2ND: Callable[[], Tensor]) -> LayerBuffer:
            if shown:
                return shown[number]
            whole = self._wholes[number]
            if whole is None:
                _, *heads, width = (written := written_M2ND()).shape
                if len(heads) == 1:
                    heads, width = [2, heads[0] // 2], self._kept.width(width)
                whole = self._zeros(number, written.device, heads=heads, width=width)
            return self._show(whole, bucket, in_rows=in_rows)

        return buffer

    def _show_all(self, bucket: int, *, in_rows: bool = False) -> Sequence[LayerBuffer] | None:
        wholes = [whole for whole in self._wholes if whole is not None]
        is_complete = len(wholes) == len(self._wholes)
        return [self._show(whole, bucket, in_rows=in_rows) for whole in wholes] if is_complete else None

    def _show(self, whole: Tensor, bucket: int, *, in_rows: bool) -> LayerBuffer:
        parts = whole.flatten(2, 3).flatten(0, 1)
        if self._reads_by_length and not in_rows:
            return LayerBuffer(parts, *whole.flatten(2, 3).transpose(1, 2).unbind())
        shown = whole[:, :, :, :bucket].transpose(1, 2)
        return LayerBuffer(parts, shown[0], shown[-1])

    def _zeros(
        self, number: int, device: torch.device, *, heads: Sequence[int], width: int, num_slots: int | None = None
    ) -> Tensor:
        """Make a layer's buffer, with as many slots as the cache if `num_slots` is None."""
        sizes = *heads, self.num_rows, self.num_slots if num_slots is None else num_slots, width
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            whole = torch.zeros(sizes, dtype=self._kept.stored_dtype, device=device)
        self._wholes[number] = whole
        return whole


BufferOf = Callable[[int, Callable[[], Tensor]], LayerBuffer]
"""See `StaticCache.buffers`."""


class CacheView(NamedTuple):
    """The slots of a cache that one forward writes and reads.

    Attributes:
        buffer: returns a layer's buffer.
        slots_M: the slots of the new tokens, numbered over all rows.
        cache_rows_B: each sequence's row in the cache; None for all rows, in order, and where rows are read by length.
        kept: how keys and values are kept.
    """

    buffer: BufferOf
    slots_M: Tensor
    cache_rows_B: Tensor | None
    kept: KeptRows

    def update(self, written_M2ND: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Write new keys and values of all heads to layer `number`; return what may be read (see `LayerBuffer`)."""
        buffer = self.buffer(number, lambda: written_M2ND)
        kept_M2NW = self.kept.pack(written_M2ND)
        buffer.parts.index_copy_(1, self.slots_M.to(written_M2ND.device), kept_M2NW.transpose(0, 1))
        keys, values = buffer.rows(self.cache_rows_B)
        return self.kept.unpack(keys, written_M2ND.dtype), self.kept.unpack(values, written_M2ND.dtype)

    def update_joint(
        self, keys_MND: Tensor, values_MND: Tensor, number: int, *, unpacks: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of different widths, or both parts of a latent, next to each other in a slot.

        Otherwise as `update`. Unless `unpacks`, they are returned in the format in which they are kept.
        """
        kept_MNW = torch.cat([self.kept.pack(keys_MND), self.kept.pack(values_MND)], -1)
        buffer = self.buffer(number, lambda: kept_MNW[:, None])
        buffer.parts.index_copy_(1, self.slots_M.to(kept_MNW.device), kept_MNW.transpose(0, 1))
        rows, width = buffer.keys, self.kept.width(keys_MND.shape[-1])
        if self.cache_rows_B is not None:
            rows = rows.index_select(0, self.cache_rows_B.to(rows.device))
        keys, values = rows[..., :width], rows[..., width:]
        if not unpacks:
            return keys, values
        return self.kept.unpack(keys, keys_MND.dtype), self.kept.unpack(values, keys_MND.dtype)


def _causal_rows(capacity: int, *, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The causal mask that attention adds to the scores: 0 up to a token's own position, minus infinity beyond.

    The mask rows of all positions are windows into one line of 2 S numbers, so a row is looked up, never computed.

        line              | 0 0 0 0 - - - - |      position 3 reads from 0, position 0 from 3: | 0 - - - |
        a window of two   | - - 0 0 - - - - |      position 3: | - - 0 0 |

    Returns the mask rows (S, S) for S = `capacity`, the last position's first. `window` is how many positions a
    token sees, including its own.
    """
    line = torch.zeros(2 * capacity, dtype=dtype, device=device)
    line[capacity:] = float("-inf")
    if window is not None:
        line[: max(capacity - window, 0)] = float("-inf")
    return line.as_strided((capacity, capacity), (1, 1))


def _begun_rows(capacity: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask of all slots from a position on, minus infinity before it; rows as in `_causal_rows`."""
    line = torch.zeros(2 * capacity, dtype=dtype, device=device)
    line[: capacity - 1] = float("-inf")
    return line.as_strided((capacity, capacity), (1, 1))


class Masks(Workspace):
    """The masks of all layers of a model, one for each distinct window; see `_causal_rows`.

    The mask of a `Chunk` is the causal one plus the mask of all slots from the chunk's first position on.

    Attributes:
        shown: the mask rows by bucket, then by window in the order of the layers.
        begun: the mask rows of all slots from a position on, by bucket, then by chunk.
    """

    def __init__(
        self, windows: Iterable[int | None], *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make(window: int | None) -> Tensor:
            seen = None if isinstance(window, Chunk) else window
            return _causal_rows(capacity, window=seen, dtype=dtype, device=device)

        wholes = {window: make(window) for window in dict.fromkeys(windows)}
        chunks = [window for window in wholes if isinstance(window, Chunk)]
        begun_SS = _begun_rows(capacity, dtype=dtype, device=device) if chunks else torch.empty(0, 0)
        self.shown = PerBucket(lambda bucket: {window: rows_SS[:, :bucket] for window, rows_SS in wholes.items()})
        self.begun = PerBucket(lambda bucket: dict.fromkeys(chunks, begun_SS[:, :bucket]))
        self._last = torch.tensor(capacity - 1, device=device)

    def rows(self, positions_BT: Tensor, *, bucket: int) -> dict[int | None, Tensor]:
        """The masks (B, 1, T, bucket) of tokens at these positions, by window in the order of the layers."""
        batch_size, _ = positions_BT.shape
        rows_M = (self._last - positions_BT).flatten()
        masks = {
            window: rows_SU.index_select(0, rows_M).unflatten(0, (batch_size, 1, -1))
            for window, rows_SU in self.shown[bucket].items()
        }
        for chunk, rows_SU in self.begun[bucket].items():
            firsts_M = (self._last - positions_BT // chunk * chunk).flatten()
            masks[chunk] += rows_SU.index_select(0, firsts_M).unflatten(0, (batch_size, 1, -1))
        return masks


class Taps(Workspace):
    """The inputs of some layers of a target, kept for every slot of its cache: a draft head reads them.

    A forward writes the taps of its tokens to the slots of their keys and values, so they are rolled back together.

    Shapes: M tokens, B sequences, T positions, E the target's width, X = E times the number of layers.

    Attributes:
        layers: the tapped layers, counted from 0.
        num_allocations: see `Runner`.
    """

    def __init__(self, layers: Sequence[int], *, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = tuple(layers)
        self._width, self._dtype, self._device = width, dtype, device
        self.num_rows = self._num_slots = self.num_allocations = 0

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate memory for `batch_size` rows of `num_slots` tokens, unless it suffices; see `Runner.allocate`."""
        if batch_size == self.num_rows and num_slots <= self._num_slots:
            return
        width = self._width * len(self.layers)
        kept_MX = torch.zeros(batch_size * num_slots, width, dtype=self._dtype, device=self._device)
        if batch_size == self.num_rows:
            kept_MX.view(batch_size, num_slots, width)[:, : self._num_slots].copy_(self.in_rows())
        self.num_rows, self._num_slots, self._kept_MX = batch_size, num_slots, kept_MX
        self._first_B1 = torch.arange(batch_size, device=self._device)[:, None] * num_slots
        self.num_allocations += 1

    def of_prompts(self, lengths_R: Tensor, rows: Sequence[int]) -> "Taps":
        """Return the taps to which forwards of prompts of these lengths write; the prompts become these rows."""
        return self

    def in_rows(self) -> Tensor:
        """The taps by rows and slots, (B, S, X)."""
        return self._kept_MX.view(self.num_rows, self._num_slots, -1)

    def slots(self, positions_BT: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """The slots (M,) of tokens at positions of rows; None for all rows, in order."""
        first_B1 = self._first_B1 if rows_B is None else self._first_B1.index_select(0, rows_B)
        return (first_B1 + positions_BT).flatten()

    def write(self, layer: int, x_ME: Tensor, slots_M: Tensor) -> None:
        """Keep the input of a layer, wherever it is in `layers`: the default taps of six layers are (2, 3, 3)."""
        for number, tapped in enumerate(self.layers):
            if tapped == layer:
                kept_ME = self._kept_MX.narrow(1, number * self._width, self._width)
                kept_ME.index_copy_(0, slots_M, x_ME.to(self._device))

    def before(self, number: int) -> list[int]:
        """The tapped layers before this one."""
        return [layer for layer in self.layers if layer < number]

    def at(self, layer: int, slots_M: Tensor) -> Tensor:
        """Return the kept input (M, E) of a tapped layer at some slots."""
        place = self.layers.index(layer) * self._width
        return self._kept_MX.narrow(1, place, self._width).index_select(0, slots_M)

    def read(self, positions_BT: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """The taps (B, T, X) at positions of rows; None for all rows, in order."""
        taps_MX = self._kept_MX.index_select(0, self.slots(positions_BT, rows_B))
        return taps_MX.view(*positions_BT.shape, -1)

    def move(self, from_BD: Tensor, to_BD: Tensor, rows_B: Tensor | None = None) -> None:
        """Copy the taps of some slots of each row to others."""
        self._kept_MX.index_copy_(0, self.slots(to_BD, rows_B), self.read(from_BD, rows_B).flatten(0, 1))

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int) -> None:
        """Copy the taps of the first slots of a row to other rows."""
        kept_BSX = self.in_rows()
        for row in to_rows:
            kept_BSX[row, :num_tokens].copy_(kept_BSX[from_row, :num_tokens])

    def clear(self, rows: Iterable[int]) -> None:
        """Overwrite rows by zeros; see `StaticCache.clear`."""
        for row in rows:
            self.in_rows()[row].zero_()

    def read_of_prompts(self, lengths_R: Tensor, *, first: int, longest: int) -> Iterator[Tensor]:
        """The positions (R, T) of prompts, from `first` on, whose taps a head reads, by chunks."""
        for start in range(first, longest, PREFILL_CHUNK):
            positions_T = torch.arange(start, min(start + PREFILL_CHUNK, longest), device=lengths_R.device)
            yield positions_T.expand(len(lengths_R), -1)

    def read_of_newest(self, positions_BT: Tensor) -> Tensor:
        """The positions whose taps a head reads, given the newest positions (B, T) of each row."""
        return positions_BT

    def share(self, positions_BT: Tensor, rows_B: Tensor | None = None, *, comm: Comm, src: int) -> None:
        """Send the taps at positions of rows from rank `src` to all other ranks of `comm`."""
        taps_BTX = comm.broadcast(self.read(positions_BT, rows_B), src=src)
        if comm.rank != src:
            self._kept_MX.index_copy_(0, self.slots(positions_BT, rows_B), taps_BTX.flatten(0, 1))


def agreed(comm: Comm, *, is_invariant: bool, packs_prompts: bool) -> tuple[bool, bool]:
    """Return whether all ranks of `comm` are invariant, and whether all pack prompts."""
    answers = comm.gather_text(f"{is_invariant:d}{packs_prompts:d}")
    return all(answer[0] == "1" for answer in answers), all(answer[1] == "1" for answer in answers)


class CachedRunner:
    """Base class of runners with a `StaticCache`; `parameter` decides their device and dtype.

    `cache_dtype` is the format of the cache, a name of `storage.formats`; `layers` are this rank's, None for all.

    Attributes:
        uses_masks: whether attention takes masks; they are made with the cache.
        layer_states: states that recurrent layers keep.
        reads: see `Runner.allocate`.
    """

    is_invariant = False
    is_recurrent = False
    layer_states: Sequence[LayerState] = ()
    reads_by_length = False
    packs_prompts = False
    uses_masks = True
    reads = Reads.all
    experts_read_3: Tensor | None = None

    def __init__(
        self, config: PretrainedConfig, parameter: Tensor, *, cache_dtype: str = OWN_DTYPE, layers: range | None = None
    ) -> None:
        self.device = parameter.device
        self.dtype = parameter.dtype
        self._kept = rows_of(cache_dtype, parameter.dtype)
        self.vocab_size: int = config.vocab_size
        self.max_position_embeddings: int = num_positions(lambda name: getattr(config, name, None))
        self.num_allocations = self.num_uses = 0
        # The last layers may read the keys and values of earlier ones.
        num_layers: int = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
        layers = layers or range(config.num_hidden_layers)
        self._slot_layers = [number for number in with_slots(config)[:num_layers] if number in layers]
        windows = record_of(config.model_type).windows_of(config)
        self._has_windows, self._windows = any(windows), windows[layers.start : layers.stop]
        self._cache: StaticCache | None = None
        self._states: StateCache | None = None
        self._saved: StateCache | None = None

    def allocate(self, *, batch_size: int, capacity: int, reads: Reads = Reads.all, num_rolled_back: int = 0) -> None:
        """See `Runner.allocate`."""
        self.num_uses += 1
        self.reads = reads
        if self.layer_states:
            self._allocate_states(batch_size=batch_size, num_kept=num_rolled_back + 1, saves=saves_states(capacity))
        before = self._cache
        if before and before.num_rows == batch_size and before.num_slots >= capacity:
            return
        self.num_allocations += 1
        self._cache = StaticCache(
            num_layers=len(self._slot_layers),
            batch_size=batch_size,
            capacity=capacity,
            device=self.device,
            kept=self._kept,
            reads_by_length=self.reads_by_length,
        )
        if before and before.num_rows == batch_size:
            self._cache.take(before)
        if self.uses_masks:
            self._masks = Masks(self._windows, capacity=capacity, dtype=self.dtype, device=self.device)

    @property
    def cache(self) -> StaticCache:
        """The cache, once it is allocated."""
        assert self._cache is not None, "allocate comes first"
        return self._cache

    def new_cache(self, *, num_slots: int) -> StaticCache:
        """Make another cache with as many rows."""
        return StaticCache(
            num_layers=len(self._slot_layers),
            batch_size=self.cache.num_rows,
            capacity=num_slots,
            device=self.device,
            kept=self._kept,
            reads_by_length=self.reads_by_length,
        )

    @property
    def state_tensors(self) -> list[Tensor]:
        """All states of rows that layers keep; none without recurrent layers."""
        return [*self._states.inputs.values(), *self._states.states.values()] if self._states else []

    def agree(self, comm: Comm) -> None:
        """See `Runner.agree`."""
        own = {"is_invariant": self.is_invariant, "packs_prompts": self.packs_prompts}
        self.is_invariant, self.packs_prompts = agreed(comm, **own)

    def forget(self) -> None:
        """See `Runner.forget`."""
        self.num_uses += 1

    def _allocate_states(self, *, batch_size: int, num_kept: int, saves: bool) -> None:
        make = partial(StateCache, self.layer_states, batch_size=batch_size, dtype=self.dtype)
        if before := self._states:
            num_kept = max(num_kept, before.num_kept)
        if not (before and (before.num_rows, before.num_kept) == (batch_size, num_kept)):
            self.num_allocations += 1
            self._states, self._saved = make(num_kept=num_kept), None
        if saves and not self._saved:
            self._saved = make(num_kept=1)

    def move(self, from_BD: Tensor, to_BD: Tensor, cache_rows_B: Tensor | None = None) -> None:
        """See `Runner.move`."""
        assert self._cache is not None, "allocate comes first"
        self._cache.move(from_BD, to_BD, cache_rows_B)

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int, *, from_saved: bool = False) -> None:
        """See `Runner.copy`."""
        assert self._cache is not None, "allocate comes first"
        self._cache.copy(from_row, [row for row in to_rows if row != from_row], num_tokens)
        if self._saved:
            self._saved.copy(from_row, to_rows)
        if self._states and from_saved:
            assert self._saved, "it was saved"
            self._states.take(self._saved, from_row, to_rows, num_tokens)
        elif self._states:
            self._states.copy(from_row, to_rows)

    def save(self, row: int, num_tokens: int) -> None:
        """See `Runner.save`."""
        if self._states and self._saved:
            self._saved.take(self._states, row, [row], num_tokens)

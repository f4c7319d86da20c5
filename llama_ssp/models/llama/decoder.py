"""A lean decoder for Llama-like models: the same function as transformers with less than half the operators.

It takes its weights layer by layer as they are loaded. Values that depend only on positions are looked up in tables.

Shapes: B sequences, T positions, M = B * T tokens, R rows that get logits, V vocabulary, E embedding width, G queries
of each key-value head, Q = T * G, S slots, U slots that are read.
"""

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.architectures.matrices import Cut, RankShard, vocabulary_parts
from llama_ssp.kernels.attention_by_length import VarlenAttention, find_varlen, unpacking
from llama_ssp.kernels.between import OwnKernels, rotate_write
from llama_ssp.kernels.equal_bits import EqualBits
from llama_ssp.kernels.linear import Kernel, Linear, make_linear, native_of
from llama_ssp.kernels.parts import Heads, RmsNorm
from llama_ssp.models.cache import CachedRunner, StaticCache, Taps
from llama_ssp.models.llama.attention import (
    Attend,
    LayerAttention,
    LengthTables,
    OperatorAttention,
    Rotations,
    attend_by_mask,
    place_and_attend,
)
from llama_ssp.models.llama.layer import Layer, NormedProduct, Stream, Unread, added, join, rows_at
from llama_ssp.models.llama.table import EMBEDDING, LAST_NORM, OUTPUT, lean_weights, rotary_of
from llama_ssp.models.runner import Pieces, TreePlaces, masks_of
from llama_ssp.models.stages import entering, leaving
from llama_ssp.models.vocabulary import embed, own_part
from llama_ssp.models.weights import Loading, Weights
from llama_ssp.ranks.comms import Reads, best_of
from llama_ssp.registry import operators


class LeanRunner(CachedRunner):
    """A Llama-like model, or this rank's slice of it, with its static cache; see `Runner`.

    Args:
        loading: its weights, all of which are taken, and how to load them; the output keeps its dtype.
        kernel: the kernel of all linear layers; None takes the fastest for each shape.
        varlen: attention that reads the cache by lengths of rows; None for this device's, or for masks if it has none.
    """

    layer_class = Layer
    _num_positions = 0
    _stops: tuple[int, ...] = ()  # The number after each of its layers whose next one is left out.

    def __init__(
        self, loading: Loading, *, kernel: Kernel | None = None, varlen: VarlenAttention | None = None
    ) -> None:
        config: Any = loading.origin.config
        comm, precision, into = loading.comm, loading.precision, loading.into
        target = loading.alike(LeanRunner) if loading.origin.shape.shares_embedding else None
        embedding_VE = target.embedding if target else None
        places = {EMBEDDING: into.model._embedding_VE} if into.model else {}
        weights = lean_weights(loading, places=places, has_embedding=embedding_VE is None)
        own, self._own = loading.own_shard, into.model._own if into.model else OwnKernels()
        like = torch.empty(0, dtype=loading.weights_dtype, device=loading.device)
        super().__init__(config, like, cache_dtype=precision.cache_dtype, layers=loading.own_layers)
        self._stage, self._comm, quantizing = loading.stage, comm, precision.kernel or kernel
        equal: EqualBits | None = None
        if loading.reproducible and comm.size == 1 and (equal := operators.made("equal_bits", like.device.type, like)):
            kernel, quantizing = equal.kernel(kernel), equal.kernel(quantizing)
        linear = self._take_tables(weights, own, embedding_VE, kernel)
        eps: float = config.rms_norm_eps
        head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._heads = Heads(len(own.heads.query_heads), len(own.heads.kv_heads), head_dim, head_dim**-0.5)
        parts: dict[str, Any] = {"comm": comm, "kernel": quantizing}
        self._layers: list[Layer] = []
        layers = self._layers
        for number in range(len(loading.own_layers)):
            layer = self.layer_class(weights, number, heads=self._heads, eps=eps, own=self._own, **parts)
            layers.append(into.keep(layer, "_layers", number))
        self._width: int = config.hidden_size
        inv_freq_P, self._rotary_factor = rotary_of(config)
        self._inv_freq_P = inv_freq_P.to(self.device)
        if linear:
            self._norm = into.keep(RmsNorm(weights.take(LAST_NORM), eps), "_norm")
            self._head = into.keep(NormedProduct(self._norm, linear, self._own), "_head")
        self._by_position = precision.rounds_inputs
        # What bitsandbytes calls depends on the inputs.
        self.repeats_operators = not self._by_position or native_of(layers[0].qkv.linear) is not None
        self._choose_attention(varlen)
        linears = [*filter(None, [linear]), *(part for layer in layers for part in layer.linears)]
        self.is_invariant = self._compiled is not None and all(map(native_of, linears))
        self._use_own_kernels(equal)
        if equal and self.reads_by_length:
            self.is_invariant = equal.holds and self.is_fused
        self._take_others(weights, loading)

    def _take_tables(
        self, weights: Weights, own: RankShard, embedding_VE: Tensor | None, kernel: Kernel | None
    ) -> Linear | None:
        """Take the embedding, unless it is given, in the first stage; in the last stage take and return the output."""
        # The largest matrix comes first: copies of it are gone before the layers need their room.
        head = None
        if self._stage.is_last:
            num_parts = self._comm.size if weights.is_cut(OUTPUT) else 1
            self._head_sizes = tuple(map(len, vocabulary_parts(self.vocab_size, num_parts)))
            head = weights.take(OUTPUT)
        self._own_ids: range | None = None
        if self._stage.is_first and embedding_VE is None:
            if weights.is_cut(EMBEDDING):
                (self._own_ids,) = own.features(Cut.vocabulary, self.vocab_size)
            embedding_VE = weights.take(EMBEDDING)
        self._embedding_VE = embedding_VE
        if head is None:
            return None
        return make_linear(head.detach(), None, kernel=kernel, keeps_weight=embedding_VE is head)

    def _take_others(self, weights: Weights, loading: Loading) -> None:
        """Take the parameters of a head that are not in its layer."""

    def _choose_attention(self, varlen: VarlenAttention | None) -> None:
        """Attend by lengths of rows, by an operator, or by masks; see `attention`."""
        self._varlen = varlen = varlen or find_varlen(
            self.device, self.dtype, self._heads, rounds_inputs=self._by_position, has_windows=self._has_windows
        )
        if varlen and self._kept.dtype is not self.dtype:
            self._varlen = unpacking(varlen, self._kept)
        self._compiled: OperatorAttention | None = None
        if not varlen:
            self._compiled = operators.made("attention", self.device.type, self.dtype, self._heads.dim, self._kept)
        if self._compiled:
            join(self._layers, self._compiled.whole_layers([layer.parts for layer in self._layers], self._windows))
        self.reads_by_length = self.packs_prompts = varlen is not None
        self.uses_masks = varlen is None and self._compiled is None

    @property
    def embedding(self) -> Tensor | None:
        """The embedding (V, E), if this rank has all of it."""
        return self._embedding_VE if self._own_ids is None else None

    @property
    def is_fused(self) -> bool:
        """Whether forwards run all of our kernels between products; see `kernels.between`."""
        return all(vars(self._own).values())

    def _use_own_kernels(self, equal: EqualBits | None = None) -> None:
        """Take this device's operators between products, in place of torch's, and its attention; see `operators`."""
        norms, device = self._layers[0].head_norms, self.device.type
        of_width = self._layers[0].gate_up.norm
        found: OwnKernels | None = operators.made("between", device, of_width, self._heads, norms, self._kept)
        if found is None or not any(vars(found).values()):
            return  # without Triton one sentence is enough
        vars(self._own).update(vars(found))
        if self._varlen:
            find = partial(operators.made, "attention_by_length", device, self._varlen)
            ours: VarlenAttention | None = (equal.attention if equal else find)(
                self._heads, device=self.device, dtype=self.dtype, has_windows=self._has_windows, kept=self._kept
            )
            self._varlen = ours or self._varlen

    @property
    def places_are_invariant(self) -> bool:
        """Whether results with `TreePlaces` are invariant too: the operator's are, those of torch's masks are not."""
        return self.is_invariant and self._compiled is not None

    @property
    def num_layers(self) -> int:
        """Number of its layers."""
        return len(self._layers)

    def part(self, numbers: Sequence[int], *, of: "LeanRunner | None" = None) -> "LeanRunner":
        """Return a runner of some layers, in order, between the same embedding and output; it shares all weights.

        With `of`, the layers are another model's. They attend without windows to all that `follow` makes visible.
        """
        part, layers = copy(self), (of or self)._layers
        vars(part).update(
            _layers=[layers[number] for number in numbers],
            _windows=(None,) * len(numbers),
            _stops=tuple(number + 1 for number in numbers if number + 1 not in numbers),
        )
        return part

    def make_buffers(self, cache: StaticCache, layers: Collection[int]) -> None:
        """Make the buffers of some layers in a cache of this model's, before a forward does."""
        cache.make_buffers(layers, self.device, num_heads=self._heads.num_kv, head_dim=self._heads.dim)

    def follow(self, whole: "LeanRunner", cache: StaticCache | None, *, reads: Reads) -> None:
        """Use the cache and the tables of `whole`, of which this runner is a `part`; `cache` replaces that cache.

        `whole` has been allocated before. Forwards then return what the caller `reads`; see `Runner.allocate`.
        """
        if cache and self._varlen and cache is not self._cache:
            self._lengths = LengthTables(batch_size=cache.num_rows, num_slots=cache.num_slots, device=self.device)
        of_part = {"_layers", "_windows", "_stops", *(["_lengths"] if cache else [])}
        own = {name: value for name, value in vars(self).items() if name in of_part}
        vars(self).update({**vars(whole), **own, "_cache": cache or whole._cache, "reads": reads})

    def allocate(self, *, batch_size: int, capacity: int, num_positions: int = 0, **how: Any) -> None:
        """See `Runner.allocate`; tokens may have `num_positions`, if that is more than there are slots."""
        known, before = self.num_allocations, self._cache
        super().allocate(batch_size=batch_size, capacity=capacity, **how)
        self.num_allocations += self._cache is before and num_positions > self._num_positions
        if self.num_allocations > known:
            assert self._cache is not None
            num_slots = self._cache.num_slots
            self._num_positions = max(num_slots, num_positions)
            self._rotations = Rotations(self._inv_freq_P, self._rotary_factor, capacity=self._num_positions)
            if self._varlen:
                self._lengths = LengthTables(batch_size=batch_size, num_slots=num_slots, device=self.device)

    def forward(  # noqa: PLR0913 - see `Runner`
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        pieces: Pieces | None = None,
        taps: Taps | None = None,
        tree: TreePlaces | None = None,
        taken_B: Tensor | None = None,
    ) -> Tensor:
        """See `Runner.forward`."""
        attention = self._attention(
            positions_BT, bucket=bucket, cache_rows_B=cache_rows_B, consecutive=consecutive, pieces=pieces, tree=tree
        )
        first = self._stage.layers.start
        tapped = [number - first for number in taps.layers] if taps else ()
        slots_M: Any = None
        if taps and pieces:
            slots_M = taps.slots(positions_BT.view(-1, 1), pieces.rows_M)
        elif taps:
            slots_M = taps.slots(tree.slots_BT if tree else positions_BT, cache_rows_B)
        ids_M, num_layers = ids_BT.flatten(), len(self._layers)
        stream = self._entering(ids_M, taps, slots_M)
        for layer, window, stop in self._at_once(len(ids_M), tapped):
            if taps and layer.number in tapped:
                stream = added(stream), None
                taps.write(first + layer.number, stream[0], slots_M)
            stream = layer.forward(stream, attention[window], stop)
        if self._stage.behind:
            self._stage.send(leaving(added(stream), self._stage, taps, slots_M), comm=self._comm)
            scored = ids_BT if score_positions_BR is None else score_positions_BR
            return torch.empty(*scored.shape, 0, device=self.device)
        for number in (num_layers, num_layers + 1):
            if taps and number in tapped:
                stream = added(stream), None
                taps.write(first + number, stream[0] if number > num_layers else self._norm(stream[0]), slots_M)
        return self._scored(stream, ids_BT.shape[0], score_positions_BR)[1]

    def _entering(self, ids_M: Tensor, taps: Taps | None, slots_M: Any) -> Stream:  # noqa: ANN401 - None without taps
        """Return the stream before the first layer: embedded tokens, or what the stage before sends, with its taps."""
        if self._stage.before:
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            how: dict[str, Any] = {"width": self._width, "comm": self._comm, "like": like}
            return entering(self._stage, len(ids_M), taps, slots_M, **how), None
        assert self._embedding_VE is not None, "the first stage has it"
        if self._own.add_norm and self._own_ids is None:
            x_ME = self._embedding_VE.new_empty(len(ids_M), self._width)
            return x_ME, Unread(self._embedding_VE, ids_M.contiguous())
        return self.embed(ids_M), None

    def _at_once(self, num_tokens: int, tapped: Collection[int] = ()) -> Iterator[tuple[Layer, int | None, int]]:
        """Yield runs of layers that one call computes: the first layer, its window and the number where the run stops.

        A run stops before a layer of `tapped`, whose inputs are wanted.
        """
        stop, stops = 0, (*tapped, *self._stops)
        for layer, window in zip(self._layers, self._windows, strict=True):
            if layer.number >= stop:
                stop = min([number for number in stops if number > layer.number] + [layer.stop_of(num_tokens)])
                yield layer, window, stop

    def embed(self, ids_M: Tensor) -> Tensor:
        """Look token ids (M,) up; the result is (M, E)."""
        assert self._embedding_VE is not None, "the first stage has it"
        if self._own_ids is None:
            return functional.embedding(ids_M, self._embedding_VE)
        return embed(ids_M, self._embedding_VE, self._own_ids, self._comm)

    def _scored(self, stream: Stream, batch_size: int, score_positions_BR: Tensor | None) -> tuple[Tensor, Tensor]:
        """The hidden states (B, R, E) of the scored positions, and their logits (B, R, V); see `Runner.allocate`."""
        if score_positions_BR is not None:
            stream = rows_at(added(stream), score_positions_BR), None
        x_ME, logits_MV = self._head(stream)
        found = self._joined(logits_MV)
        return x_ME.view(batch_size, -1, self._width), found.view(batch_size, -1, found.shape[-1])

    @property
    def _first_output(self) -> int:
        """The first token whose logits this rank computes."""
        return sum(self._head_sizes[: self._comm.rank])

    def _joined(self, logits: Tensor) -> Tensor:
        """Return all logits (..., V) in fp32, or the part of them that is read, given this rank's logits."""
        if self.reads is Reads.best:
            return best_of(logits, first=self._first_output, comm=self._comm)
        if self.reads is Reads.own:
            return own_part(logits, self.vocab_size, self._comm).float()
        return self._comm.all_gather_last(logits, self._head_sizes).float()

    def _attention(
        self,
        positions_BT: Tensor,
        *,
        bucket: int,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        pieces: Pieces | None = None,
        tree: TreePlaces | None = None,
        seen_BT: Tensor | None = None,
    ) -> dict[int | None, LayerAttention]:
        """Make a function for each window that writes to the cache and attends in one forward.

        Trees use masks if there is no operator for them. A single node per row needs no mask: it sees all slots up to
        its own, which is a length. `seen_BT` are the last positions that tokens see, by default their own; a row's
        first token always sees its own.
        """
        assert self._cache is not None, "allocate comes first"
        if self._compiled:
            assert pieces is None
            view = self._cache.view(tree.slots_BT if tree else positions_BT, bucket=bucket, cache_rows_B=cache_rows_B)
            where = self._rotations.freqs_cis_S1P, positions_BT, view
            return self._compiled.of_forward(*where, tree=tree, seen_BT=seen_BT, windows=self._windows)
        masked = tree
        if tree and tree.sees_to_itself and seen_BT is None:
            masked, seen_BT = None if self._varlen else tree, tree.slots_BT
        seen_BT = positions_BT if seen_BT is None else seen_BT
        freqs_cis_S1P, placed_BT, rows_B = self._rotations.freqs_cis_S1P, positions_BT, cache_rows_B
        if pieces:
            placed_BT, rows_B = positions_BT.view(-1, 1), pieces.rows_M  # each token has a row of its own
        kernel, slots_M = self._own.rotate_write, None
        if kernel:
            turns_SP2 = torch.view_as_real(freqs_cis_S1P)
            place = partial(kernel, turns_SP2=turns_SP2, positions_BT=placed_BT.contiguous(), kept=self._kept)
        else:
            freqs_cis_M1P = freqs_cis_S1P.index_select(0, placed_BT.flatten())
            place = partial(rotate_write, freqs_cis_M1P=freqs_cis_M1P, kept=self._kept)
        placed_BT = tree.slots_BT if tree else placed_BT
        if masked:
            buffer, slots_M, *_ = self._cache.view(placed_BT, bucket=bucket, cache_rows_B=rows_B, in_rows=True)
        elif kernel and rows_B is None and not tree:
            buffer = self._cache.buffers(bucket)
        else:
            buffer, slots_M, rows_B, _ = self._cache.view(placed_BT, bucket=bucket, cache_rows_B=rows_B)
        if self._varlen and not masked:
            attends = self._lengths.attends(
                self._varlen, self._windows, seen_BT, cache_rows_B=cache_rows_B, consecutive=consecutive, pieces=pieces
            )
        else:
            attends = self._masked(seen_BT, masked, bucket=bucket)
        place = partial(place, slots_M=slots_M)
        way = partial(place_and_attend, rotate_write=place, buffer=buffer, cache_rows_B=rows_B)
        return {window: partial(way, attend=attend) for window, attend in attends.items()}

    def _masked(self, positions_BT: Tensor, tree: TreePlaces | None, *, bucket: int) -> dict[int | None, Attend]:
        batch_size, group = positions_BT.shape[0], self._heads.num // self._heads.num_kv
        if tree:
            masks = {
                window: mask_BTU.repeat_interleave(group, dim=1)[:, None]
                for window, mask_BTU in masks_of(tree, self._windows, dtype=self.dtype).items()
            }
        else:
            positions_BQ = positions_BT[..., None].repeat(1, 1, group).flatten(1)
            masks = self._masks.rows(positions_BQ, bucket=bucket)
        way = partial(attend_by_mask, batch_size=batch_size, by_position=self._by_position, kept=self._kept)
        return {window: partial(way, mask_B1QS=mask) for window, mask in masks.items()}

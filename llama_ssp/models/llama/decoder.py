"""A lean decoder for Llama-like models: the same function as transformers with less than half the operators.

It takes the weights from the modules of transformers, sharded by `tensor_parallel`, layer by layer as they are loaded,
and leaves the modules empty. Values that depend only on positions are looked up in tables.

Shapes: B sequences, T positions, M = B * T tokens, R rows that get logits, V vocabulary, E embedding width, G queries
of each key-value head, Q = T * G, S slots, U slots that are read.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from llama_ssp.architectures.family import record_of
from llama_ssp.architectures.sizes import PAGE_SLOTS
from llama_ssp.kernels.attention import Attention, find_attention
from llama_ssp.kernels.linear import Kernel, make_linear, native_of
from llama_ssp.models.cache import CachedRunner
from llama_ssp.models.llama.attention import (
    Attend,
    CompiledAttention,
    LayerAttention,
    LengthTables,
    MaskedAttention,
    placed_attention,
)
from llama_ssp.models.llama.layer import Layer, normed, take
from llama_ssp.models.llama.rotary import PlaceByKernel, PlaceByOperators, PlaceHeads, RmsNorm, Rotations
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.runner import Pieces
from llama_ssp.models.tensor_parallel import GatheredLinear
from llama_ssp.models.triton_tools import attempt
from llama_ssp.models.varlen import VarlenAttention, find_varlen, over_more_blocks
from llama_ssp.ranks.comms import Comm
from llama_ssp.shapes import static_shape

if TYPE_CHECKING:
    from llama_ssp.models.llama.gpu_layers import GpuLayers


def is_llama_kind(config: PretrainedConfig) -> bool:
    """Whether the lean decoder supports this model."""
    if not record_of(config.model_type).is_llama_kind or config.hidden_act != "silu":
        return False
    rope: dict[str, Any] = config.rope_parameters or {}
    return bool(rope.get("partial_rotary_factor", 1.0) == 1.0)


class LeanRunner(CachedRunner):
    """A Llama-like model, or this rank's slice of it, with its static cache; see `Runner`.

    Args:
        model: of transformers, sharded by `tensor_parallel.shard`; unusable afterwards.
        comm: the ranks that share it.
        fill: loads the parameters whose names begin with a prefix; None if they are loaded.
        kernel: of all linear layers; None takes the fastest for each shape.
        precision: of the linear layers; the head keeps its dtype.
        fuses: on a GPU, products take in the norm, the gate and the residual; see `gpu_layers`.
        varlen: reads the cache by lengths of rows; None for that of this device, or masks if it has none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        comm: Comm,
        fill: Callable[[str], None] | None = None,
        kernel: Kernel | None = None,
        precision: Precision = UNQUANTIZED,
        fuses: bool = False,
        varlen: VarlenAttention | None = None,
    ) -> None:
        config: Any = model.config
        body: Any = model.model
        head: Any = model.lm_head
        assert is_llama_kind(config)
        fill = fill or (lambda _prefix: None)
        layers = []
        for number, layer in enumerate(body.layers):
            fill(f"model.layers.{number}.")
            layers.append(Layer(layer, number, comm=comm, kernel=precision.kernel or kernel))
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
        self._to_logits = normed(self._norm, self._head)
        self.repeats_operators = self.repeats_at_any_length = precision.repeats_operators(layers[0].qkv)
        self._by_position = precision.rounds_inputs
        self._varlen = varlen = varlen or find_varlen(
            self.device, self.dtype, layers[0].heads, rounds_inputs=self._by_position, has_windows=any(self._windows)
        )
        self._compiled = None if varlen else find_attention(self.device, self.dtype, layers[0].heads.dim)
        self.reads_by_length = self.packs_prompts = varlen is not None
        self.uses_masks = varlen is None and self._compiled is None
        linears = [self._head, *(linear for layer in layers for linear in layer.linears)]
        self.is_thread_invariant = self._compiled is not None and all(map(native_of, linears))
        self._gpu_layers: GpuLayers | None = None
        if self.device.type == "cuda":
            self._use_gpu_layers(fuses=fuses)

    @property
    def is_fused(self) -> bool:
        """Whether forwards run all of our kernels between products; see `gpu_layers`."""
        return self._gpu_layers is not None and all(self._gpu_layers.kernels)

    def _use_gpu_layers(self, *, fuses: bool) -> None:
        """Take the layers of GPUs, with those of our kernels that work here."""
        from llama_ssp.models.llama.gpu_layers import GpuLayers  # noqa: PLC0415 - only GPUs need it

        self._gpu_layers = GpuLayers(self._layers, self._norm, self._head, comm=self._comm, fuses=fuses)
        if self._varlen and any(self._gpu_layers.kernels):  # without Triton one sentence is enough
            split = partial(
                over_more_blocks, self._varlen, self._layers[0].heads, device=self.device, dtype=self.dtype,
                has_windows=any(self._windows),
            )  # fmt: skip
            self._varlen = attempt(split, instead="continuing with torch's attention for long batches") or self._varlen

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """See `Runner.allocate`."""
        known = self.num_allocations
        super().allocate(batch_size=batch_size, capacity=capacity)
        if self.num_allocations > known:
            assert self._cache is not None
            num_slots = self._cache.num_slots
            self._rotations = Rotations(self._rotary, capacity=num_slots, device=self.device)
            if self._varlen:
                self._lengths = LengthTables(
                    batch_size=batch_size, num_slots=num_slots, page_slots=PAGE_SLOTS, device=self.device
                )

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        pieces: Pieces | None = None,
    ) -> Tensor:
        """See `Runner.forward`."""
        batch_size, _ = static_shape(ids_BT)
        placing = partial(
            self._placing,
            positions_BT,
            bucket=bucket,
            cache_rows_B=cache_rows_B,
            consecutive=consecutive,
            pieces=pieces,
        )
        x_ME = self._embed(ids_BT.flatten())
        if self._gpu_layers:
            place, attend = placing()
            attends = [attend[window] for window in self._windows]
            own_MV = self._gpu_layers.forward(x_ME, place, attends, score_positions_BR=score_positions_BR)
        else:
            if self._compiled:
                assert pieces is None
                attention = self._by_operator(self._compiled, positions_BT, bucket, cache_rows_B)
            else:
                attention = placed_attention(*placing())
            for layer, window in zip(self._layers, self._windows, strict=True):
                x_ME = layer.forward(x_ME, attention[window])
            if score_positions_BR is not None:
                x_BTE = x_ME.view(batch_size, -1, self._width)
                x_ME = x_BTE.gather(1, score_positions_BR[..., None].expand(-1, -1, self._width)).flatten(0, 1)
            own_MV = self._to_logits(x_ME)
        logits_MV: Tensor = self._comm.all_gather_last(own_MV, self._head_sizes)
        return logits_MV.view(batch_size, -1, self.vocab_size).float()

    def _placing(
        self,
        positions_BT: Tensor,
        *,
        bucket: int,
        cache_rows_B: Tensor | None,
        consecutive: bool,
        pieces: Pieces | None,
    ) -> tuple[PlaceHeads, dict[int | None, Attend]]:
        """How one forward writes and reads the cache; the latter by window."""
        assert self._cache is not None, "allocate comes first"
        freqs_cis_S1P = self._rotations.freqs_cis_S1P
        place: PlaceHeads
        if pieces:
            positions_BT, cache_rows_B = positions_BT.view(-1, 1), pieces.rows_M  # each token has a row of its own
        kernel = self._gpu_layers.kernels.rotate_write if self._gpu_layers else None
        if kernel and cache_rows_B is None:
            buffers = self._cache.buffers(bucket)
            place = PlaceByKernel(kernel, freqs_cis_S1P, positions_BT.contiguous(), None, buffers)
        else:
            view = self._cache.view(positions_BT, bucket=bucket, cache_rows_B=cache_rows_B)
            if kernel:
                place = PlaceByKernel(
                    kernel, freqs_cis_S1P, positions_BT.contiguous(), view.slots_M, view.buffer, view.cache_rows_B
                )
            else:
                place = PlaceByOperators(freqs_cis_S1P.index_select(0, positions_BT.flatten()), view)
        if self._varlen is None:
            return place, self._masked(positions_BT, bucket=bucket)
        if pieces:
            rows = self._lengths.rows_of_pieces(pieces)
        else:
            rows = self._lengths.rows(positions_BT, cache_rows_B=cache_rows_B, consecutive=consecutive)
        return place, self._lengths.attend(self._varlen, rows, self._windows)

    def _by_operator(
        self, operator: Attention, positions_BT: Tensor, bucket: int, cache_rows_B: Tensor | None
    ) -> dict[int | None, LayerAttention]:
        """How one forward attends by the compiled operator, by window."""
        assert self._cache is not None, "allocate comes first"
        view = self._cache.view(positions_BT, bucket=bucket, cache_rows_B=cache_rows_B)
        where = self._rotations.freqs_cis_S1P, positions_BT.contiguous(), view
        return {window: CompiledAttention(operator, *where, window) for window in self._windows}

    def _masked(self, positions_BT: Tensor, *, bucket: int) -> dict[int | None, Attend]:
        heads = self._layers[0].heads
        batch_size, _ = static_shape(positions_BT)
        positions_BQ = positions_BT[..., None].repeat(1, 1, heads.num // heads.num_kv).flatten(1)
        masks = self._masks.rows(positions_BQ, bucket=bucket)
        return {window: MaskedAttention(mask, batch_size, self._by_position) for window, mask in masks.items()}

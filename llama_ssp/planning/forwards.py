"""Forecasts the time of one forward on its ranks: matrices, attention, operators, and collectives with the draws.

    layers x (matrices + keys and values read + operators + all-reduces) + frame + head + gathered logits

The figures of a machine are bandwidth, matrix rate, times of a kernel and of a launch, and sums over ranks by size.
They are from data sheets, or measured by `task=calibrate`; a CPU's first run measures its products.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import Inventory, WholeParts, tokens_of_a_block, vocabulary_parts
from llama_ssp.machines.hardware import ATTENTION, HardwareConfig
from llama_ssp.planning.collectives import ID_BYTES, PROBABILITY_BYTES, all_reduce_s, message_s
from llama_ssp.planning.model import DTYPE_BYTES, PlannedModel, expands_latents
from llama_ssp.planning.weights import of_stage, rank_shares
from llama_ssp.settings.backends import TENSOR, Backend
from llama_ssp.settings.rules import AT_ZERO, rule_of
from llama_ssp.storage.formats import NO_QUANTIZATION, StorageFormat, all_rows_bytes, format_of

MOST_DRAFT_TOKENS = 16
"""K up to which rounds are compared; the kernel of recurrent layers takes their tokens in at once."""
OPERATORS_PER_LAYER = 25
"""Operators that the lean decoder launches per layer, including views."""
COMPILED_OPERATORS, _ROUNDINGS = 7, 10
"""Operators of a compiled layer that is not one operator: four products, attention, and two sums of the ranks; and the
casts that in 16 bits widen the inputs of the first five and round their outputs."""
LIBRARY_SHARE = {"cuda": 2.0, "cpu": 4.0}
"""Operators of the library's modules per layer, over the lean decoder's: on a GPU kernels count, about 50, and on a CPU
all that Python calls, 57 to 142 in the families with records, with experts' operators."""
_SCORES_MOVED = 9
"""Reads and writes of a score of attention to latents: by two products, a mask, the softmax and a product."""
_CACHED_BYTES = 2**24
"""Bytes of keys and values that attention on a CPU reads as fast as weights, see docs/findings/forecasts.md."""
_SUM_BYTES = 4
"""Bytes of a number of a part's sums."""
_FUSED_SUMS = 2  # Sums of a layer that also add to the residual and compute the next norm.
USUAL_SHARE = 0.75
"""Share of the best product's rate that prompts and large batches reach (`flops_share`)."""
UNPACKING_S = 0.8e-9
"""Time in which bitsandbytes 0.50 unpacks a weight on one core: 0.44 ns in caches, 0.73 in 16 MiB, more beyond."""
BEST_BYTES = 8
"""A rank's largest logit of a position, and its token."""


class ShardDraws(NamedTuple):
    """Draws by a rule of ranks that share a model, without gathering logits: over shards, or each rank's best token."""

    rule: str
    is_certain: bool = False
    by_kernel: bool = False  # Triton's softmax has several peaks a rank.


@dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """A model on its ranks, or on its GPUs if layer-wise; the key by which prices are cached.

    Attributes:
        whole: parts of the model that each rank holds whole.
        own_sums: whether the program's kernel makes the sums that it can take.
        equal_bits: whether a GPU runs the kernels of `reproducible=true`.
        draws: how the ranks draw without gathering logits; None if they gather them.
        stages, stage: the layers of each stage, and the number of this one; the last stage has the logits.
    """

    model: PlannedModel
    backend: Backend = TENSOR
    ranks: tuple[int, ...]
    cuda_graphs: bool
    kernels: engine.Kernels = engine.ENGINE_KERNELS
    whole: WholeParts = WholeParts.none
    own_sums: bool = False
    equal_bits: bool = False
    draws: ShardDraws | None = None
    stages: tuple[range, ...] = (range(0),)
    stage: int = 0

    def __hash__(self) -> int:
        """Computed once, since a search prices thousands of forwards."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(
            (
                self.model,
                self.backend,
                self.ranks,
                self.whole,
                self.own_sums,
                self.equal_bits,
                self.draws,
                self.stages,
                self.stage,
            )
        )

    @property
    def is_last(self) -> bool:
        """Whether it makes the logits."""
        return self.stage == len(self.stages) - 1

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return len(self.stages[self.stage]) or self.model.shape.num_hidden_layers

    def sum_bytes(self, tokens: int) -> int:
        """Bytes of a sum of the ranks, or of a residual that goes on to the next device."""
        return tokens * self.model.shape.hidden_size * DTYPE_BYTES[self.model.dtype]

    def collectives(self, num_rows: int, num_positions: int, num_scored: int) -> tuple[int, int]:
        """Number of sums and gathers of a forward and its draws, and their bytes on each rank."""
        if len(self.ranks) == 1 or self.backend.is_layer_wise:
            return 0, 0
        of_draws = self.draw_messages(num_rows, num_scored) if self.is_last else []
        sums, sum_bytes = self.shares[0].num_all_reduces, self.sum_bytes(num_rows * num_positions)
        return sums + len(of_draws), sums * sum_bytes + sum(of_draws)

    def draw_messages(self, num_rows: int, num_scored: int) -> list[int]:
        """Bytes of each message of the draws at `num_scored` positions of each row; all but the last were drafted.

        The messages are all logits if ranks gather them, and each rank's best token for a greedy rule. Else they are
        maxima and sums of exponentials, the probabilities of drafted tokens and the residuals for a rule that compares
        them, and the sum of each block with a token drawn in it.
        """
        total, vocab_size, draws = num_rows * num_scored, self.model.shape.vocab_size, self.draws
        if draws is None:
            return [total * vocab_size * DTYPE_BYTES[self.model.dtype]]
        record, best = rule_of(draws.rule), total * BEST_BYTES * len(self.ranks)
        if draws.rule == AT_ZERO:
            return [best]
        parts = vocabulary_parts(vocab_size, len(self.ranks))
        num_peaks = sum(-(-len(part) // engine.SOFTMAX_TOKENS) if draws.by_kernel else 1 for part in parts)
        softmax, of_row = total * BEST_BYTES * num_peaks, 2 * ID_BYTES * -(-vocab_size // tokens_of_a_block(vocab_size))
        if record.draws_by_position:
            return [softmax, best]
        if num_scored == 1 or draws.is_certain:
            return [softmax, total * of_row]
        num_drafted = num_rows * (num_scored - 1)
        residuals = [num_drafted * ID_BYTES] * record.keeps_all_rows
        return [softmax, num_drafted * 2 * PROBABILITY_BYTES, *residuals, num_rows * of_row]

    @property
    def num_drawn_parts(self) -> int:
        """Among how many ranks the numbers of a draw are shared out."""
        return len(self.ranks) if self.draws and self.draws.rule != AT_ZERO else 1

    @cached_property
    def shares(self) -> tuple[Inventory, ...]:
        """Parameters of each device if layer-wise, else each distinct share of the ranks; raises as `rank_shares`."""
        held = rank_shares(self.model, num_ranks=len(self.ranks), backend=self.backend, whole=self.whole)
        held = of_stage(held, self.stages, self.stage)
        return held if self.backend.is_layer_wise else tuple(dict.fromkeys(held))

    @cached_property
    def most_heads(self) -> tuple[int, int]:
        """Query and key-value heads of the rank with the most; groups are cut only where ranks outnumber them."""
        num_ranks, shape = len(self.ranks), self.model.shape
        num_heads, num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        if self.backend.is_layer_wise or self.whole is WholeParts.attention:
            return num_heads, num_kv_heads
        own = -(-num_kv_heads // num_ranks)
        return own * (num_heads // num_kv_heads) if num_ranks <= num_kv_heads else -(-num_heads // num_ranks), own


@dataclass(frozen=True, kw_only=True)
class ForwardTime:
    """Seconds of one forward on the slowest rank, by cause; attention includes recurrent states."""

    matrices_s: float
    attention_s: float
    operators_s: float
    collectives_s: float

    @classmethod
    def sum(cls, times: Sequence["ForwardTime"], *, messages_s: float) -> "ForwardTime":
        """The time of forwards one after the other, with messages between them."""
        found = {name: sum(getattr(each, name) for each in times) for name in vars(times[0])}
        return cls(**found | {"collectives_s": found["collectives_s"] + messages_s})

    @property
    def total_s(self) -> float:
        """Sum of the parts, which do not overlap."""
        return self.matrices_s + self.attention_s + self.operators_s + self.collectives_s


@lru_cache(maxsize=8192)  # a search asks for the same forwards many times
def forward_time(
    placement: ModelPlacement,
    hardware: HardwareConfig,
    *,
    batch_size: int,
    num_positions: int,
    num_scored: int,
    bucket: int,
) -> ForwardTime:
    """Forecast the time of a forward of T = `num_positions`.

    `num_scored` positions per row get logits, and attention reads `bucket` cache slots.
    """
    tokens, scored = batch_size * num_positions, batch_size * num_scored
    layer_wise, last = placement.backend.is_layer_wise, placement.shares[-1]
    matrices = [
        _matrices_s(
            placement,
            hardware,
            held,
            tokens=tokens,
            scored=scored,
            has_head=held.scores and (not layer_wise or held is last),
        )
        for held in placement.shares
    ]
    num_layers = placement.num_layers + _more_layers(placement, hardware, num_positions)
    frame_s = placement.kernels.frame * (hardware.kernel_s if placement.cuda_graphs else hardware.launch_s)
    return ForwardTime(
        matrices_s=sum(matrices) if layer_wise else max(matrices),
        attention_s=_attention_s(
            placement, hardware, batch_size=batch_size, num_positions=num_positions, num_slots=bucket
        ),
        operators_s=num_layers * _layer_s(placement, hardware, tokens) + frame_s,
        collectives_s=_collectives_s(placement, hardware, tokens=tokens, num_rows=batch_size, num_scored=num_scored),
    )


def _matrices_s(
    placement: ModelPlacement, hardware: HardwareConfig, held: Inventory, *, tokens: int, scored: int, has_head: bool
) -> float:
    model = placement.model
    storage, plain = model.storage, format_of(NO_QUANTIZATION)
    product = partial(_roofline_s, model=model, hardware=hardware, equal_bits=placement.equal_bits)
    layer = product(held.matrix_sizes, storage=storage, tokens=tokens)
    layer += product(held.kept_sizes, storage=plain, tokens=tokens)
    plain_bytes, operations = DTYPE_BYTES[model.dtype] * held.plain_elements, 2 * tokens * held.plain_elements
    layer += _product_s(plain_bytes, model, hardware, operations=operations)
    experts = 0.0
    for matrix in held.experts:  # a copy that is read multiplies the tokens that chose it
        used, size = matrix.num_used(tokens), matrix.num_rows * matrix.num_columns
        own_tokens = max(round(tokens * matrix.num_chosen / used), 1)
        experts += used * product({size: 1}, storage=plain if matrix.is_kept else storage, tokens=own_tokens)
    head = product({held.output.num_elements: 1}, storage=plain, tokens=scored) if has_head else 0.0
    return held.num_layers * (layer + experts) + head


def _roofline_s(
    sizes: Mapping[int, int],
    model: PlannedModel,
    storage: StorageFormat,
    hardware: HardwareConfig,
    *,
    tokens: int,
    equal_bits: bool = False,
) -> float:
    """Matrix products with `tokens` inputs, by `matrix_sizes`: the longer of reading a matrix and multiplying."""
    matrix_dtype = model.matrix_dtype(hardware.device)
    value_bytes = DTYPE_BYTES[matrix_dtype]
    times = 1.0 if storage.is_quantized else hardware.slowdown.get(model.dtype.name, 1.0)
    seconds = 0.0
    for size, count in sizes.items():
        packed = storage.packing.matrix_bytes(size, value_bytes, group=model.layout.group if model.layout else 0)
        read_bytes: float = packed
        if storage.is_quantized:
            read_bytes = storage.read_bytes(
                tokens, packed, value_bytes * size, device=hardware.device, slowdown=hardware.slowdown
            )
        if equal_bits:
            read_bytes = all_rows_bytes(tokens, packed, value_bytes * size, hardware.slowdown)
        operations = 2 * tokens * size
        if speed := hardware.products.get(storage.name if storage.is_quantized else matrix_dtype.name):
            seconds += count * times * max(read_bytes / speed.bytes_per_s, operations / speed.flops_per_s)
        elif hardware.device == "cpu" and storage.cost.unpacks_matrix:
            product_s = _product_s(value_bytes * size, model, hardware, operations=operations)
            seconds += count * (UNPACKING_S * size + product_s)
        else:
            seconds += count * times * _product_s(read_bytes, model, hardware, operations=operations)
    return seconds


def _product_s(read_bytes: float, model: PlannedModel, hardware: HardwareConfig, *, operations: float) -> float:
    """Return the longer of reading and computing, with the shares of the data sheet's rates that engines reach.

    On a GPU, two long times overlap only in part: the result is at least the root of the sum of their squares, with
    computing at the rate of the best products. This fits published gains of drafts in batches
    (docs/findings/forecasts.md).
    """
    flops = hardware.flops_per_s.get(model.dtype.name) or max(hardware.flops_per_s.values())
    reading, computing = read_bytes / hardware.read_bytes_per_s, operations / (hardware.flops_share * flops)
    both = math.hypot(reading, USUAL_SHARE * computing) if hardware.device == "cuda" else 0.0
    return max(reading, computing, both)


def _attention_s(
    placement: ModelPlacement, hardware: HardwareConfig, *, batch_size: int, num_positions: int, num_slots: int
) -> float:
    """Seconds of attention to `num_slots` slots in all layers, on the rank with the most heads.

    The longer of reading and multiplying counts, see `_product_s`; recurrent states are added. What is counted:

    - Pairs: a position attends to itself and to earlier ones, so on average to half of a block of new positions.
    - Recurrent states: each row reads its first state and writes the states after its tokens; a prompt writes the last.
    - Latents: read once by compiled operators; on a GPU the sums of the parts of a text are written and read as well.
      torch's operators read the latents for the scores, read them again without the rotary keys for the sums, and write
      and read the scores. A chunk that expands latents copies them, and writes and reads keys and values of all heads.
    - A compiled operator of a CPU whose rates have been measured first lays out what it reads and then multiplies, so
      its two times add up.
    """
    model, (num_heads, num_kv_heads) = placement.model, placement.most_heads
    shape, num_pairs = model.shape, num_slots - (num_positions - 1) / 2
    num_layers = model.num_attention_layers
    widths = 2 * shape.head_dim
    read_bytes: float = num_slots * (batch_size * model.slot_bytes(num_kv_heads))
    operations = 0.0
    if shape.latent_width:
        slots, size = batch_size * num_slots * num_layers, DTYPE_BYTES[model.dtype]
        if expands_latents(shape, num_positions):
            key_dim, made = shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.qk_nope_head_dim + shape.v_head_dim
            widths = key_dim + shape.v_head_dim
            read_bytes += slots * size * (2 * shape.latent_width + 2 * num_heads * (made + key_dim))
            operations = 2.0 * slots * shape.latent_rank * num_heads * made
        else:
            widths = shape.latent_width + shape.latent_rank
            read_bytes = batch_size * num_slots * model.latent_read_bytes(hardware)
            of_queries = slots * size * _SCORES_MOVED
            if model.has_latent_kernel(hardware):
                num_parts = engine.latent_parts(num_slots) if hardware.device == "cuda" else 0
                of_queries = 2 * _SUM_BYTES * shape.latent_rank * num_parts * batch_size * num_layers
            read_bytes += of_queries * num_positions * num_heads
    operations += 2 * batch_size * num_positions * num_pairs * num_heads * widths * num_layers
    if placement.equal_bits:  # a tile of queries reads its keys and values for itself
        group = num_heads // num_kv_heads
        read_bytes *= math.ceil(num_positions / (engine.equal_tile_rows(group) // group))
    num_moved = 1 + (num_positions if num_positions <= MOST_DRAFT_TOKENS + 1 else 1)
    together = sum if placement.backend.is_layer_wise else max
    states_bytes = batch_size * together(model.state_bytes(num_moved, held=held) for held in placement.shares)
    states_s = states_bytes / hardware.read_bytes_per_s
    share, values = placement.num_layers / shape.num_hidden_layers, inventory(shape).cached_values
    if values and len(placement.stages) > 1:
        share = (placement.shares[0].cached_values or 0) / values
    speed = None if shape.latent_width or not model.is_lean else hardware.products.get(ATTENTION)
    read_bytes, operations = share * read_bytes, share * operations
    if speed:
        beyond = max(read_bytes - _CACHED_BYTES, 0)
        reading_s = (read_bytes - beyond) / hardware.read_bytes_per_s + beyond / speed.bytes_per_s
        return reading_s + operations / speed.flops_per_s + states_s
    return _product_s(read_bytes, model, hardware, operations=operations) + states_s


def _more_layers(placement: ModelPlacement, hardware: HardwareConfig, num_positions: int) -> float:
    """Return the cost of the operators that only recurrent layers have, in layers of transformers' modules.

    It is 0 for a round on a GPU, where one kernel does this work; prompts need the operators.
    """
    if hardware.device == "cuda" and num_positions <= MOST_DRAFT_TOKENS + 1:
        return 0.0
    held = placement.shares if placement.backend.is_layer_wise else placement.shares[:1]
    num_recurrent = sum(kept.num_layers for share in held for kept in share.states if kept.num_values)
    return num_recurrent * (placement.kernels.recurrent_layer / placement.kernels.library_layer - 1)


def _layer_s(placement: ModelPlacement, hardware: HardwareConfig, tokens: int) -> float:
    """The operators of a layer and their launches, without matrices, cache and collectives."""
    share = 1.0 if placement.model.is_lean else LIBRARY_SHARE[hardware.device]
    if placement.cuda_graphs:
        kernels = placement.kernels
        fused = _FUSED_SUMS if placement.own_sums and placement.sum_bytes(tokens) <= engine.OWN_SUM_BYTES else 0
        return (kernels.layer - fused if placement.model.is_lean else kernels.library_layer) * hardware.kernel_s
    # The compiled layer needs fused multiply-add, which no data sheet here mentions and nearly every CPU has.
    is_compiled = hardware.device == "cpu" and placement.model.is_lean
    if is_compiled and not placement.model.storage.cost.unpacks_matrix:
        if placement.model.dtype.is_short:
            return (COMPILED_OPERATORS + _ROUNDINGS) * hardware.launch_s
        is_one = len(placement.ranks) == 1 and tokens <= engine.WHOLE_LAYER_TOKENS
        # Layers in one operator take about as long as a launch each to meet between their steps.
        return (1 if is_one else COMPILED_OPERATORS) * hardware.launch_s
    return share * OPERATORS_PER_LAYER * hardware.launch_s


def _collectives_s(
    placement: ModelPlacement, hardware: HardwareConfig, *, tokens: int, num_rows: int, num_scored: int
) -> float:
    if len(placement.ranks) == 1:
        return 0.0
    sum_bytes = placement.sum_bytes(tokens)
    if placement.backend.is_layer_wise:
        return sum(message_s(hardware, neighbours, sum_bytes) for neighbours in pairwise(placement.ranks))
    reduce_s = all_reduce_s(hardware, placement.ranks, sum_bytes, is_own=placement.own_sums)
    gathered = placement.draw_messages(num_rows, num_scored) if placement.is_last else []
    if placement.stage:  # the slices of hidden states
        gathered = [sum_bytes, *gathered]
    gather_s = sum(all_reduce_s(hardware, placement.ranks, num_bytes / 2) for num_bytes in gathered)
    return placement.shares[0].num_all_reduces * reduce_s + gather_s

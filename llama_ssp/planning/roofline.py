"""Forecasts the time of one forward: bytes over bandwidth, FLOPs over rate, and fixed costs.

    forward = layers x (matrices + keys and values read + operators + all-reduces) + frame + head + gathered logits

The figures have two sources. A machine measured by `task=calibrate` has a profile: times of linear layers by size and
rows, of the other operators of a layer, and of collectives by size. Any other machine has data sheets: bandwidth,
matrix rate, time per kernel, and latency and bandwidth of links.

Parts that were timed separately do not add up to a whole forward. A profile therefore also has the ratio of measured
forwards to their sums, and every part is scaled by it.

Shapes: B sequences, T positions.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.inventory import Inventory
from llama_ssp.architectures.sizes import ENGINE_KERNELS, WHOLE_LAYER_TOKENS, Kernels
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.profile import LinearPoint, Profile, RowsPoint, SizePoint
from llama_ssp.planning.memory import rank_shares, step_bytes
from llama_ssp.planning.spec import DTYPE_BYTES, PlannedModel
from llama_ssp.settings.formats import NO_QUANTIZATION, StorageFormat, format_of
from llama_ssp.settings.schema import Dtype, TargetKind, WholeParts

_X = itemgetter(0)
_Surface: TypeAlias = list[tuple[int, list[tuple[int, list[tuple[float, float]]]]]]
"""(elements, seconds) by rows, by the working set, all in increasing order."""


def line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between (x, y) points with increasing x.

    Beyond the ends the nearest segment is extrapolated: above, not below the last y; below, not below 0.
    """
    if len(points) == 1:
        return points[0][1]
    start = max(bisect_right(points, x, hi=len(points) - 1, key=_X) - 1, 0)
    (x0, y0), (x1, y1) = points[start], points[start + 1]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(y, points[-1][1]) if x > points[-1][0] else y if x >= points[0][0] else max(y, 0.0)


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate over the logarithm of x, constant beyond the ends."""
    logs = [(math.log(known), y) for known, y in points]
    return line(logs, min(max(math.log(x), logs[0][0]), logs[-1][0]))


class LinearTable:
    """Measured linear layers, interpolated by the size of the matrix, the rows and the working set."""

    def __init__(self, points: Iterable[LinearPoint]) -> None:
        self._points = list(points)
        self._surfaces: dict[tuple[str, Dtype, Dtype], tuple[_Surface, bool]] = {}

    def has_arithmetic(self, arithmetic: Dtype) -> bool:
        """Whether layers of this arithmetic were measured."""
        return any(point.arithmetic == arithmetic.name for point in self._points)

    def seconds(
        self, elements: int,
        *,
        rows: int, dtype: Dtype, working_set_bytes: int, arithmetic: Dtype = Dtype.fp32, slowdown: float = 1.0,
        quantization: str = NO_QUANTIZATION,
    ) -> float:  # fmt: skip
        """The time of one layer; `LinearPoint` describes the arguments.

        A number format that was not measured uses the points of the first measured one. An arithmetic that was not
        measured takes `slowdown` times as long as fp32 on 16-bit weights. A `quantization` that was measured uses its
        own points; another one those of the number format.
        """
        kind = quantization, arithmetic, dtype
        if kind not in self._surfaces:
            self._surfaces[kind] = self._surface_of(*kind)
        surface, is_measured = self._surfaces[kind]
        by_set = [
            (set_bytes, line([(known, line(points, elements)) for known, points in by_rows], rows))
            for set_bytes, by_rows in surface
        ]
        return (1.0 if is_measured else slowdown) * between(by_set, working_set_bytes)

    def _surface_of(self, quantization: str, arithmetic: Dtype, dtype: Dtype) -> tuple[_Surface, bool]:
        """The points to interpolate, and whether they are of this arithmetic; fp32 is the one that every table has."""
        own = [point for point in self._points if point.dtype == quantization]
        stored = own or [point for point in self._points if point.dtype in Dtype.__members__]
        found = [point for point in stored if point.arithmetic == arithmetic.name]
        if not found and arithmetic is not Dtype.fp32:
            return self._surface_of(quantization, Dtype.fp32, Dtype.fp16)[0], False
        found = found or stored
        name = dtype.name if any(point.dtype == dtype.name for point in found) else found[0].dtype
        by_set: dict[int, dict[int, list[tuple[float, float]]]] = {}
        for point in sorted(found, key=lambda point: (point.working_set_bytes, point.rows, point.elements, point.s)):
            if point.dtype == name:
                by_rows = by_set.setdefault(point.working_set_bytes, {})
                by_rows.setdefault(point.rows, []).append((point.elements, point.s))
        return [(set_bytes, list(by_rows.items())) for set_bytes, by_rows in by_set.items()], True


@lru_cache(maxsize=32)
def _tables_of(profile: Profile) -> tuple[LinearTable, LinearTable]:
    """The linear layers of a profile, and those whose matrix is also an embedding, sorted once for all plans."""
    return LinearTable(profile.linear), LinearTable(profile.tied_head)


def by_size(points: list[SizePoint], size: float) -> float:
    """Interpolate measured times by one size; 0 without any."""
    return line([(point.size, point.s) for point in points], size) if points else 0.0


def _by_rows_and_width(points: list[RowsPoint], rows: int, width: int) -> float:
    widths = sorted({point.width for point in points})
    return line(
        [(known, line(sorted((p.rows, p.s) for p in points if p.width == known), rows)) for known in widths], width
    )


COPY_SHARE = 0.83
"""Default share of the data sheet's bandwidth that a plain copy reaches: 1.7 of 2.039 TB/s on an A100-80GB."""
OPERATORS_PER_LAYER = 25
"""Operators that the lean decoder launches per layer, including views; the library's modules launch about 50."""
LIBRARY_SHARE = 2.0
MEASURED_SLOTS = 64
"""Cache slots that were read while the layers of a profile were timed."""

CPU_SLOWDOWN_16_BITS = 3.0
"""Products in bf16 relative to fp32 with 16-bit weights; estimated from whole models on one CPU, 2.5 to 3.7."""


@dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """A model on its ranks (GPUs if layer-wise), by which forwards are priced once for all jobs of a search.

    `num_active` ranks of a node work at the same time, which selects the profile. Each forward reads offloaded layers
    for `waiting_s`. Each rank holds the parts `whole` whole. The target of the job is on `target_ranks`.
    """

    model: PlannedModel
    kind: TargetKind
    ranks: tuple[int, ...]
    cuda_graphs: bool
    num_active: int
    target_ranks: tuple[int, ...] = ()
    waiting_s: float = 0.0
    kernels: Kernels = ENGINE_KERNELS
    whole: WholeParts = WholeParts.none

    def __hash__(self) -> int:
        """Computed once, since a search prices thousands of forwards."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.kind, self.ranks, self.target_ranks, self.num_active, self.whole))

    @cached_property
    def shares(self) -> tuple[Inventory, ...]:
        """Parameters of the ranks, without duplicates if they work at the same time; raises as `rank_shares`."""
        held = rank_shares(self.model, num_ranks=len(self.ranks), kind=self.kind, whole=self.whole)
        return held if self.kind is TargetKind.accelerate else tuple(dict.fromkeys(held))


@dataclass(frozen=True, kw_only=True)
class ForwardTime:
    """Seconds of one forward on the slowest rank, by cause."""

    matrices_s: float
    attention_s: float
    operators_s: float
    collectives_s: float
    offload_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of the parts, which do not overlap."""
        return self.matrices_s + self.attention_s + self.operators_s + self.collectives_s + self.offload_s

    def scaled(self, ratio: float) -> "ForwardTime":
        """The same forward with all parts except the offload scaled by `ratio`."""
        scaled = {name: ratio * seconds for name, seconds in vars(self).items()}
        return ForwardTime(**scaled | {"offload_s": self.offload_s})


def bandwidth(hardware: HardwareConfig) -> float:
    """Achievable bytes/s of a long read."""
    return hardware.copy_bytes_per_s or COPY_SHARE * hardware.bandwidth_bytes_per_s


@lru_cache(maxsize=8192)  # a search asks for the same forwards many times
def forward_time(
    placement: ModelPlacement, hardware: HardwareConfig,
    *,
    batch_size: int, num_positions: int, num_scored: int, bucket: int,
) -> ForwardTime:  # fmt: skip
    """Forecast the time of a forward of T = `num_positions`.

    `num_scored` positions per row get logits, and attention reads `bucket` cache slots.
    """
    rows, scored = batch_size * num_positions, batch_size * num_scored
    layer_wise, last = placement.kind is TargetKind.accelerate, placement.shares[-1]
    matrices = [
        _matrices_s(placement, hardware, held, rows=rows, scored=scored, has_head=not layer_wise or held is last)
        for held in placement.shares
    ]
    layers = placement.model.shape.num_hidden_layers
    parts = ForwardTime(
        matrices_s=sum(matrices) if layer_wise else max(matrices),
        attention_s=_attention_s(
            placement, hardware, batch_size=batch_size, num_positions=num_positions, num_slots=bucket
        ),
        operators_s=layers * _layer_s(placement, hardware, rows) + _frame_s(placement, hardware, rows),
        collectives_s=_collectives_s(placement, hardware, rows=rows, scored=scored),
        offload_s=placement.waiting_s,
    )
    profile = hardware.profile_of(placement.num_active)
    if not profile:
        return parts
    # A draft on one of the ranks that share the target has the machine to itself: the others wait.
    is_apart = len(placement.ranks) == 1 and not set(placement.ranks) < set(placement.target_ranks)
    return parts.scaled(profile.forward_ratio_apart if is_apart else profile.forward_ratio)


def _read_bytes(held: Inventory, model: PlannedModel, hardware: HardwareConfig) -> int:
    head = held.output.num_elements if held.head or held.embeddings else 0
    value_bytes, storage = DTYPE_BYTES[model.matrix_dtype(hardware.device)], format_of(model.quantization)
    layer_bytes = sum(storage.matrix_bytes(elements, value_bytes) for elements in held.products)
    return held.num_layers * layer_bytes + value_bytes * head


def _matrices_s(
    placement: ModelPlacement, hardware: HardwareConfig, held: Inventory, *, rows: int, scored: int, has_head: bool
) -> float:
    """All matrix products of one rank."""
    model = placement.model
    if profile := hardware.profile_of(placement.num_active):
        arithmetic = Dtype.fp32 if format_of(model.quantization).is_quantized else model.dtype
        price = partial(
            LinearTable.seconds, dtype=model.matrix_dtype(hardware.device), slowdown=_slowdown(hardware, model.dtype),
            working_set_bytes=_read_bytes(held, model, hardware),
        )  # fmt: skip
        linear, tied = _tables_of(profile)
        layer = sum(
            price(linear, elements, rows=rows, arithmetic=arithmetic, quantization=model.quantization)
            for elements in held.products
        )
        is_tied = held.head is None and model.matrix_dtype(hardware.device) is model.dtype
        heads = tied if is_tied and tied.has_arithmetic(model.dtype) else linear
        head = price(heads, held.output.num_elements, rows=scored, arithmetic=model.dtype) if has_head else 0.0
    else:
        storage, plain = format_of(model.quantization), format_of(NO_QUANTIZATION)
        layer = _roofline_s(held.matrix_sizes, model, storage, hardware, rows=rows)
        head = _roofline_s({held.output.num_elements: 1}, model, plain, hardware, rows=scored) if has_head else 0.0
    return held.num_layers * layer + head


def _slowdown(hardware: HardwareConfig, arithmetic: Dtype) -> float:
    """Time of a matrix product in a number format, relative to fp32 arithmetic on as many bytes."""
    is_slow = hardware.device == "cpu" and arithmetic.is_short
    return hardware.slowdown.get(arithmetic.name, CPU_SLOWDOWN_16_BITS if is_slow else 1.0)


def _roofline_s(
    sizes: Mapping[int, int], model: PlannedModel, storage: StorageFormat, hardware: HardwareConfig, *, rows: int
) -> float:
    """Matrix products with `rows` inputs, by `matrix_sizes`: the longer of reading a matrix and multiplying."""
    value_bytes, bytes_per_s = DTYPE_BYTES[model.matrix_dtype(hardware.device)], bandwidth(hardware)
    flops = hardware.flops_per_s.get(model.dtype.name) or max(hardware.flops_per_s.values())
    times = 1.0 if storage.is_quantized else _slowdown(hardware, model.dtype)
    seconds = 0.0
    for size, count in sizes.items():
        read_bytes = storage.gpu_read_bytes(rows, storage.matrix_bytes(size, value_bytes), value_bytes * size)
        seconds += count * times * max(read_bytes / bytes_per_s, 2 * rows * size / flops)
    return seconds


def _attention_s(
    placement: ModelPlacement, hardware: HardwareConfig, *, batch_size: int, num_positions: int, num_slots: int
) -> float:
    """Reading keys and values of `num_slots` slots in all layers, on the rank with the most heads.

    The layers of a profile include MEASURED_SLOTS of them; the others are priced by the number of rows.
    """
    shape, read_bytes = placement.model.shape, batch_size * _slot_bytes(placement)
    if profile := hardware.profile_of(placement.num_active):
        rows = num_positions * shape.num_attention_heads // shape.num_key_value_heads
        byte_s = by_size(profile.attention, rows)
        return max(num_slots - MEASURED_SLOTS, 0) * read_bytes * byte_s
    return num_slots * read_bytes / bandwidth(hardware)


def _slot_bytes(placement: ModelPlacement) -> int:
    """Keys and values of a cache slot in all layers, on the rank with the most heads."""
    shape = placement.model.shape
    has_all_heads = placement.kind is TargetKind.accelerate or placement.whole.keeps_attention
    num_ranks = 1 if has_all_heads else len(placement.ranks)
    num_heads = -(-shape.num_key_value_heads // num_ranks)
    return 2 * num_heads * shape.head_dim * DTYPE_BYTES[placement.model.dtype] * shape.num_hidden_layers


def least_bytes(placement: ModelPlacement, *, batch_size: int, context: int, device: str) -> int:
    """Bytes that a forward of one token per row must read behind `context` tokens: weights once, keys and values.

    On the slowest rank; layer-wise on all devices, which take turns. At the speed of a copy this is the physical limit.
    """
    whole = inventory(placement.model.shape)
    shares = (whole,) if placement.kind is TargetKind.accelerate else placement.shares
    weights = max(step_bytes(held, placement.model, device=device) for held in shares)
    return weights + batch_size * context * _slot_bytes(placement)


def _layer_s(placement: ModelPlacement, hardware: HardwareConfig, rows: int) -> float:
    """The operators of a layer and their launches, without matrices, cache and collectives."""
    share = 1.0 if placement.model.is_lean else LIBRARY_SHARE
    if profile := hardware.profile_of(placement.num_active):
        return share * _by_rows_and_width(profile.layer, rows, placement.model.shape.hidden_size)
    if placement.cuda_graphs:
        return placement.kernels.layer * hardware.kernel_s
    # The compiled layer needs fused multiply-add, which no data sheet here mentions and nearly every CPU has.
    is_compiled = hardware.device == "cpu" and placement.model.is_lean and placement.model.dtype is Dtype.fp32
    if is_compiled and len(placement.ranks) == 1 and rows <= WHOLE_LAYER_TOKENS:
        return hardware.launch_s
    return share * OPERATORS_PER_LAYER * hardware.launch_s


def _frame_s(placement: ModelPlacement, hardware: HardwareConfig, rows: int) -> float:
    """A forward without its layers and the head."""
    if profile := hardware.profile_of(placement.num_active):
        return _by_rows_and_width(profile.frame, rows, placement.model.shape.hidden_size)
    return placement.kernels.frame * (hardware.kernel_s if placement.cuda_graphs else hardware.launch_s)


def _collectives_s(placement: ModelPlacement, hardware: HardwareConfig, *, rows: int, scored: int) -> float:
    """All-reduces and the gather of logits; layer-wise, the hops of devices."""
    if len(placement.ranks) == 1:
        return 0.0
    shape, size = placement.model.shape, DTYPE_BYTES[placement.model.dtype]
    residual_bytes = rows * shape.hidden_size * size
    if placement.kind is TargetKind.accelerate:
        return sum(message_s(hardware, neighbours, residual_bytes) for neighbours in pairwise(placement.ranks))
    reduce_s = all_reduce_s(hardware, placement.ranks, residual_bytes)
    gather_s = all_reduce_s(hardware, placement.ranks, scored * shape.vocab_size * size / 2)
    return placement.shares[0].num_all_reduces * reduce_s + gather_s


def all_reduce_s(hardware: HardwareConfig, ranks: tuple[int, ...], num_bytes: float) -> float:
    """One all-reduce: within each node, then between nodes. An all-gather moves half of the bytes.

    A ring of n ranks sends 2 (n - 1) / n times the bytes over every link.
    """
    profile = hardware.profile_of(len(ranks))
    if profile and profile.all_reduce:
        return by_size(profile.all_reduce, num_bytes)
    num_nodes = len({rank // hardware.num_gpus for rank in ranks})
    inside, seconds = -(-len(ranks) // num_nodes), 0.0
    for link, size, sent in (hardware.link, inside, num_bytes), (hardware.network, num_nodes, num_bytes / inside):
        if link and size > 1:
            seconds += link.latency_s
            seconds += 2 * (size - 1) / size * sent / link.bandwidth_bytes_per_s
    return seconds


def message_s(hardware: HardwareConfig, ranks: tuple[int, ...], num_bytes: float) -> float:
    """One message from a rank to others: a broadcast of ids, or a residual for the next device."""
    if len(ranks) == 1:
        return 0.0
    profile = hardware.profile_of(len(ranks))
    if profile and profile.all_reduce:
        return by_size(profile.all_reduce, num_bytes)
    apart = min(ranks) // hardware.num_gpus != max(ranks) // hardware.num_gpus
    link = hardware.network if apart and hardware.network else hardware.link
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s

"""Computes the bytes that each rank needs, item by item, from a job and a machine.

Weights and caches are exact. Activations, logits and graphs follow the peak of what the loop keeps alive. Device
context, communication buffers and graph nodes are figures of the machine, or the estimates below.

Shapes: B sequences, T positions, W = K + 1 positions of a round, V vocabulary, E hidden size, I MLP units, D head dim.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from llama_ssp.architectures.family import record_of
from llama_ssp.architectures.sizes import BUCKET_STEP, PREFILL_CHUNK
from llama_ssp.config.drafters import Matching
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.rules import rule_of
from llama_ssp.config.schema import ADAPTIVE_LENGTHS
from llama_ssp.planning.parts import Part, draft_parts, target_parts
from llama_ssp.planning.spec import PlannedModel, PlanSpec
from llama_ssp.planning.weights import DTYPE_BYTES

GRAPH_NODE_BYTES = 32 * 1024
"""Memory of one kernel in a captured graph, estimated from logs of serving engines (0.3-1 GiB for 67 graphs)."""
TIGHT_SHARE = 0.03
"""A rank with a smaller share of its memory left is called tight."""
SLACK_SHARE = 0.02
"""Estimated fragmentation of the caching allocator, as a share of what it serves."""


@dataclass(frozen=True, kw_only=True)
class RankMemoryPlan:
    """Bytes needed on one rank at the same time, and its capacity.

    The `repeated_bytes` are the part of the weights that every rank of the model holds whole: norms, row scales,
    unsharded tables. The `row_scale_bytes` are the part of those that quantized row-parallel matrices need.
    """

    rank: int
    target_weights_bytes: int
    draft_weights_bytes: int
    target_cache_bytes: int
    draft_cache_bytes: int
    logits_bytes: int
    activations_bytes: int
    graphs_bytes: int
    collectives_bytes: int
    context_bytes: int
    slack_bytes: int
    total_bytes: int
    loading_peak_bytes: int
    capacity_bytes: int
    target_repeated_bytes: int
    draft_repeated_bytes: int
    target_row_scale_bytes: int
    draft_row_scale_bytes: int
    target_heads: int

    @property
    def needed_bytes(self) -> int:
        """The larger of the peaks while loading and while running."""
        return max(self.total_bytes, self.loading_peak_bytes)

    @property
    def free_bytes(self) -> int:
        """Remaining bytes; negative if the plan does not fit."""
        return self.capacity_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether this rank has enough memory."""
        return self.free_bytes >= 0

    @property
    def is_tight(self) -> bool:
        """Whether it fits with little left."""
        return 0 <= self.free_bytes < TIGHT_SHARE * self.capacity_bytes

    def as_items(self) -> dict[str, int | bool]:
        """All figures, including the derived ones."""
        names = ("needed_bytes", "free_bytes", "fits", "is_tight")
        return asdict(self) | {name: getattr(self, name) for name in names}


def memory(job: PlanSpec, hardware: HardwareConfig) -> tuple[RankMemoryPlan, ...]:
    """The bytes of every rank, replica after replica; PlacementError if a model cannot be laid out as requested.

    GPUs that hold layers but have no rank count as ranks.
    """
    replica = replica_memory(job, hardware)
    further = range(1, job.num_replicas)
    return (*replica, *(replace(one, rank=one.rank + n * len(replica)) for n in further for one in replica))


def replica_memory(job: PlanSpec, hardware: HardwareConfig) -> tuple[RankMemoryPlan, ...]:
    """The bytes of every rank of the first replica; the others need the same."""
    by_rank = {rank: plan for plan, ranks in _equal_ranks(job, hardware) for rank in ranks}
    return tuple(plan if plan.rank == rank else replace(plan, rank=rank) for rank, plan in sorted(by_rank.items()))


def fullest_rank(job: PlanSpec, hardware: HardwareConfig) -> RankMemoryPlan:
    """The rank that has the least memory left, of a replica."""
    return min((plan for plan, _ in _equal_ranks(job, hardware)), key=lambda plan: plan.free_bytes)


@lru_cache(maxsize=256)  # a search asks more than once
def _equal_ranks(job: PlanSpec, hardware: HardwareConfig) -> tuple[tuple[RankMemoryPlan, list[int]], ...]:
    """The bytes of ranks that need the same, as those of the first one, with all of these ranks; in their order."""
    targets, drafts = target_parts(job, hardware), draft_parts(job, hardware)
    found: dict[tuple[object, ...], tuple[RankMemoryPlan, list[int]]] = {}
    for rank in sorted({*targets, *drafts}):
        target, draft = targets.get(rank), drafts.get(rank)
        has_more_logits = rank in (job.layout.verify_rank, job.target_devices[-1])
        key = id(target), id(draft), rank if has_more_logits else None  # equal parts are the same objects
        if key not in found:
            found[key] = _rank_memory(job, hardware, rank, target, draft), []
        found[key][1].append(rank)
    return tuple(found.values())


def _rank_memory(
    job: PlanSpec, hardware: HardwareConfig, rank: int, target: Part | None, draft: Part | None
) -> RankMemoryPlan:
    parts = [part for part in (target, draft) if part]
    served = {
        "target_weights_bytes": target.weights.total_bytes if target else 0,
        "draft_weights_bytes": draft.weights.total_bytes if draft else 0,
        "target_cache_bytes": target.cache_bytes if target else 0,
        "draft_cache_bytes": draft.cache_bytes if draft else 0,
        "logits_bytes": _logits_bytes(job, rank) + _numbers_bytes(job),
        "activations_bytes": max(
            _activation_bytes(job, hardware, job.target, target),
            _activation_bytes(job, hardware, job.draft, draft) if job.draft else 0,
        ),
    }
    fixed = {
        "graphs_bytes": _graph_bytes(job, hardware, draft) if job.cuda_graphs else 0,
        "collectives_bytes": hardware.collective_bytes * _num_communicators(job, rank),
        "context_bytes": hardware.context_bytes,
        "slack_bytes": int(SLACK_SHARE * sum(served.values())) if hardware.device == "cuda" else 0,
    }
    loading = sum(part.weights.total_bytes for part in parts) + max(part.beside_bytes for part in parts)
    return RankMemoryPlan(
        rank=rank,
        **served,
        **fixed,
        total_bytes=sum(served.values()) + sum(fixed.values()),
        loading_peak_bytes=loading + hardware.context_bytes + fixed["collectives_bytes"],
        capacity_bytes=hardware.rank_bytes,
        target_repeated_bytes=target.weights.on_every_rank_bytes if target else 0,
        draft_repeated_bytes=draft.weights.on_every_rank_bytes if draft else 0,
        target_row_scale_bytes=target.weights.repeated_scale_bytes if target else 0,
        draft_row_scale_bytes=draft.weights.repeated_scale_bytes if draft else 0,
        target_heads=target.num_heads if target else 0,
    )


def _num_communicators(job: PlanSpec, rank: int) -> int:
    """The groups of several ranks that this one belongs to: of all replicas, of its own, of each model.

    NCCL keeps buffers for each from the beginning; equal groups are one.
    """
    groups = {job.layout.ranks, tuple(job.target_ranks), tuple(job.draft_ranks)}
    of_replicas = job.num_replicas > 1
    return of_replicas + sum(len(group) > 1 and rank in group for group in groups)


def _logits_bytes(job: PlanSpec, rank: int) -> int:
    """Bytes of vocabulary-sized tensors of a round on this rank.

    Ranks of the target have logits (gathered, then in fp32). The rank that runs the rule has the target's and the
    draft's probabilities in fp32, one more copy if the rule keeps all rows, and one fp64 cumulative sum per row to draw
    from. Penalties and races need more. Other ranks of the draft have its probabilities.
    """
    layout, rows = job.layout, job.round_rows
    size, vocabulary, num_draft_tokens = DTYPE_BYTES[job.target.dtype], job.target.shape.vocab_size, rows - 1
    logits = rows * (2 * size * (len(job.target_ranks) > 1) + 4) if rank in job.target_ranks else 0
    logits += rows * size * (rank == job.target_devices[-1] and rank not in job.target_ranks)
    drafts, num_own = rank in job.draft_ranks, job.batch_size
    if layout.splits_batch:
        num_own = -(-job.batch_size // len(job.draft_ranks)) if drafts else 0
    decides = drafts if layout.splits_batch else rank == layout.verify_rank
    whole = 4 * rows * rule_of(job.rule).keeps_all_rows
    rule = 4 * rows + 4 * num_draft_tokens + whole + 8 if decides else 4 * num_draft_tokens * drafts
    if drafts and job.matching is Matching.intersection:
        rule += 8  # the draft's logits with one more column, and what is moved to the target's ids
    if decides and job.overlaps:  # of what is in flight, while those of the next block arrive
        rule += 4 * rows
    if decides:  # counts, penalized logits and a mask; the bits of a race and what is made of them
        rule += rows * (9 * job.counts_tokens + 16 * rule_of(job.rule).draws_by_position)
    return vocabulary * (job.batch_size * logits + num_own * rule)


def _numbers_bytes(job: PlanSpec) -> int:
    """All uniforms that the rows can need, in fp64, twice while all rows are admitted at once."""
    num_drafted = job.num_draft_tokens * job.drafts + (job.num_draft_tokens - 1) * job.overlaps
    of_a_round = 3 * num_drafted + 4
    return 2 * 8 * job.batch_size * (job.max_new_tokens + 1) * of_a_round


def _activation_bytes(job: PlanSpec, hardware: HardwareConfig, model: PlannedModel, part: Part | None) -> int:
    """Peak of a prefill chunk: the residual and its norm, attention or the MLP, and masks where it needs them.

    With masks the lean decoder copies queries and attended values, and has a row of the mask for each query of a group.
    Modules of the library repeat keys and values for each head of a group.
    """
    if part is None:
        return 0
    shape, size = model.shape, DTYPE_BYTES[model.dtype]
    rows = min(PREFILL_CHUNK, job.prompt_tokens)
    bucket = bucket_of(job.prompt_tokens, job.num_slots, hardware)
    record, heads_width = record_of(shape.model_type), part.num_heads * shape.head_dim
    group, attended, masks, repeated = shape.num_attention_heads // shape.num_key_value_heads, 2 * part.width, 0, 0
    if not model.reads_by_length(hardware):
        masks = rows * bucket * record.attention_pair_bytes(num_heads=part.num_heads, value_bytes=size)
        if model.is_lean and hardware.device == "cuda":
            masks, attended = masks * group, max(attended, part.width + 3 * heads_width)
        elif not model.is_lean and group > 1 and not record.keeps_scores:
            repeated = 2 * bucket * heads_width * size
    wide = max(rows * attended * size + repeated, rows * 3 * part.units * size)
    return job.batch_size * (rows * 3 * shape.hidden_size * size + wide + masks) + part.working_bytes


def _graph_bytes(job: PlanSpec, hardware: HardwareConfig, draft: Part | None) -> int:
    """Captured graphs: the target's plain and round forwards and all K draft steps.

    They serve all lengths where every model reads its cache by lengths; with masks there are some for each bucket.
    Rounds that overlap may have K - 1 more draft steps, for rows that wait for a block.
    """
    by_length = all(model.reads_by_length(hardware) for model in (job.target, job.draft) if model)
    num_buckets = 1 if by_length else -(-job.num_slots // BUCKET_STEP[hardware.device])
    lengths = ADAPTIVE_LENGTHS if job.adapts else (job.num_draft_tokens,)
    layers = (1 + len(lengths) * job.drafts) * job.target.shape.num_hidden_layers
    if job.draft and draft:
        num_steps = sum(lengths) + (job.num_draft_tokens - 1) * job.overlaps
        layers += num_steps * job.draft.shape.num_hidden_layers
    return num_buckets * layers * job.kernels.layer * GRAPH_NODE_BYTES


def bucket_of(num_tokens: int, num_slots: int, hardware: HardwareConfig) -> int:
    """Cache slots that a forward reads if `num_tokens` of a row are filled."""
    step = BUCKET_STEP[hardware.device]
    return min(-(-num_tokens // step) * step, num_slots)


def kv_bytes_per_token(model: PlannedModel) -> int:
    """Keys and values of one token in all layers, over all ranks."""
    shape = model.shape
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * DTYPE_BYTES[model.dtype]


def fits(job: PlanSpec, hardware: HardwareConfig) -> bool:
    """Whether every rank has enough memory."""
    return fullest_rank(job, hardware).fits


def largest_batch(job: PlanSpec, hardware: HardwareConfig, *, limit: int = 4096) -> int:
    """The largest batch that fits at this context; 0 if none does."""
    return _largest(lambda rows: fits(replace(job, batch_size=rows), hardware), limit)


def largest_context(job: PlanSpec, hardware: HardwareConfig) -> int:
    """The longest row (prompt and new tokens) that fits at this batch size and in the models' contexts."""
    models = [job.target, *([job.draft] if job.draft else [])]
    limit = min(model.shape.max_position_embeddings for model in models) - job.max_new_tokens
    prompt = _largest(lambda tokens: fits(replace(job, prompt_tokens=tokens), hardware), limit)
    return prompt + job.max_new_tokens if prompt else 0


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which a monotone property holds, by bisection; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low

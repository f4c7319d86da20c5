"""Computes the bytes that each rank needs, item by item, from a spec and a machine.

Weights and caches are exact. Activations, logits and graphs follow the peak of what the loop keeps alive. Device
context, communication buffers and graph nodes are figures of the machine, or the estimates below.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, cycle, pairwise

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.matrices import Cut, WholeParts, check_experts, vocabulary_parts
from llama_ssp.errors import PlacementError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.model import DTYPE_BYTES, PlannedModel, expands_latents
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.weights import WeightBytes, model_bytes, of_stage, rank_shares, split
from llama_ssp.settings.backends import TENSOR, Backend
from llama_ssp.settings.rules import rule_of

GB, GIB = 10**9, 2**30


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One model's part on one rank, or on one device of a layer-wise target; by default empty.

    Attributes:
        width: numbers in the queries, keys and values of a position.
        working_bytes: bytes of the largest unpacked matrix.
        slot_bytes: bytes of a slot of the cache.
        row_bytes: bytes of a row beyond its slots.
        temporary_bytes: bytes needed in addition to the weights while loading.
    """

    weights: WeightBytes = field(default_factory=WeightBytes)
    slot_bytes: int = 0
    row_bytes: int = 0
    num_heads: int = 0
    width: int = 0
    units: int = 0
    working_bytes: int = 0
    temporary_bytes: int = 0

    def cache_bytes(self, num_slots: int, num_rows: int) -> int:
        """Bytes of its cache with `num_slots` slots of all rows."""
        return num_slots * self.slot_bytes + num_rows * self.row_bytes


_NOTHING = _Part()


@lru_cache(maxsize=1024)  # a search asks for each target with every draft, and a plan with every batch and context
def _parts(
    model: PlannedModel,
    device: str,
    *,
    num_ranks: int,
    backend: Backend = TENSOR,
    whole: WholeParts = WholeParts.none,
    num_shared: int = 0,
    num_kept: tuple[int, ...] = (),
    stages: tuple[range, ...] = (range(0),),
) -> tuple[_Part, ...]:
    """The parts by rank or device, without tables that are shared; for `num_kept` see `PlanSpec.kept_states`.

    `num_ranks` counts the ranks of each stage.
    """
    shape, size, storage = model.shape, DTYPE_BYTES[model.dtype], model.storage
    num_slices = 1 if backend.is_layer_wise else num_ranks
    shards, _ = split(tuple(vars(shape).items()), num_ranks=num_slices, quantization=model.quantization, whole=whole)
    # On a CPU the host memory, into which it reads, is the planned memory.
    is_whole_first = backend.reads_whole and device == "cpu"
    whole_bytes = model_bytes(inventory(shape), model, device=device).total_bytes if is_whole_first else 0
    most_unpacked = math.inf if storage.cost.unpacks_matrix else storage.cost.gpu_unpacks if device == "cuda" else 0
    parts = []
    shares = rank_shares(model, num_ranks=num_ranks, backend=backend, whole=whole)
    if device == "cuda" and shape.num_experts and not (storage.is_quantized or backend.by_library):
        check_experts(shards, shape.moe_intermediate_size, value_bytes=size)
    of_stages = chain.from_iterable(of_stage(shares, stages, number) for number in range(len(stages)))
    for held, shard in zip(of_stages, cycle(shards), strict=False):
        num_heads, num_kv_heads = len(shard.heads.query_heads), len(shard.heads.kv_heads)
        weights = model_bytes(held.without_tables(num_shared), model, device=device)
        part = _Part(
            weights=weights,
            slot_bytes=model.slot_bytes(num_kv_heads, held),
            row_bytes=model.state_bytes(*num_kept, held=held),
            num_heads=num_heads,
            width=(num_heads + 2 * num_kv_heads) * shape.head_dim,
            units=shard.num_features(Cut.mlp_units, shape.intermediate_size),
            working_bytes=size * int(min(max(held.products), most_unpacked)),
            temporary_bytes=whole_bytes or weights.temporary_bytes,
        )
        parts.append(part)
    return tuple(parts)


def _target_parts(spec: PlanSpec) -> dict[int, _Part]:
    parts = _parts(
        spec.target,
        spec.device,
        num_ranks=len(spec.target_devices) // spec.num_stages,
        backend=spec.backend,
        num_kept=spec.kept_states[0],
        stages=spec.stages,
    )
    devices = spec.target_devices if spec.num_stages == 1 else chain.from_iterable(spec.layout.stages)
    return dict(zip(devices, parts, strict=True))


def _draft_parts(spec: PlanSpec) -> dict[int, _Part]:
    if spec.draft is None:
        return _copied_parts(spec) if spec.free_terms.copied_format else {}
    num_ranks = 1 if spec.layout.splits_batch else len(spec.draft_ranks)
    parts = _parts(
        spec.draft,
        spec.device,
        num_ranks=num_ranks,
        whole=spec.draft_whole,
        num_shared=spec.num_shared_tables,
        num_kept=spec.kept_states[1],
    )
    return dict(zip(spec.draft_ranks, cycle(parts), strict=False))


def _copied_parts(spec: PlanSpec) -> dict[int, _Part]:
    """The weights of a second copy of the target's layers, which shares tables and cache; see `DraftTerms`."""
    terms, number = spec.free_terms, len(spec.target_devices)
    model = replace(spec.target, quantization=str(terms.copied_format))
    stages = range(0), range(terms.copied_layers), range(0)
    parts = _parts(model, spec.device, num_ranks=number, stages=stages)[number : 2 * number]
    return {
        rank: replace(part, slot_bytes=0, row_bytes=0) for rank, part in zip(spec.target_devices, parts, strict=True)
    }


GRAPH_NODE_BYTES = 32 * 1024
"""Memory of one kernel in a captured graph, estimated from logs of serving engines (0.3-1 GiB for 67 graphs)."""
NCCL_NODES = 4
"""Nodes of a layer's two sums by NCCL: each is a kernel, and an event that NCCL records, as an H100 has shown."""
TIGHT_SHARE = 0.03
"""A rank with a smaller share of its memory left is called tight."""
SLACK_SHARE = 0.01
"""Fragmentation of the caching allocator, as a share of what it serves: 0.4 to 1.3 % on an H200."""


@dataclass(frozen=True, kw_only=True)
class RankMemoryPlan:
    """Bytes needed on one rank at the same time, and its capacity.

    The `repeated_bytes` are the part of the weights that every rank of the model holds alike: norms, row scales,
    unsharded tables.
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
    def room(self) -> str:
        """The needed and the available bytes in words."""
        return f"{self.needed_bytes / GIB:.1f} of {self.capacity_bytes / GIB:.1f} GiB"

    @property
    def is_tight(self) -> bool:
        """Whether it fits with little left."""
        return 0 <= self.free_bytes < TIGHT_SHARE * self.capacity_bytes


def memory(spec: PlanSpec, hardware: HardwareConfig) -> tuple[RankMemoryPlan, ...]:
    """The bytes of every rank, replica after replica; PlacementError if a model cannot be laid out as requested.

    GPUs that hold layers but have no rank count as ranks.
    """
    by_rank = sorted((rank, plan) for plan, ranks in _equal_ranks(spec, hardware) for rank in ranks)
    first = range(0, spec.num_replicas * len(by_rank), len(by_rank))
    return tuple(replace(plan, rank=start + rank) for start in first for rank, plan in by_rank)


def fullest_rank(spec: PlanSpec, hardware: HardwareConfig) -> RankMemoryPlan:
    """The rank of a replica with the least free memory; raises as `memory`."""
    return min((plan for plan, _ in _equal_ranks(spec, hardware)), key=lambda plan: plan.free_bytes)


@lru_cache(maxsize=256)  # a search asks more than once
def _equal_ranks(spec: PlanSpec, hardware: HardwareConfig) -> tuple[tuple[RankMemoryPlan, list[int]], ...]:
    """The memory of a replica's ranks, grouped if equal: the plan of the first rank and all ranks of each group."""
    targets, drafts = _target_parts(spec), _draft_parts(spec)
    found: dict[tuple[object, ...], tuple[RankMemoryPlan, list[int]]] = {}
    for rank in sorted({*targets, *drafts}):
        target, draft = targets.get(rank, _NOTHING), drafts.get(rank, _NOTHING)
        has_more_logits = rank in (spec.layout.verify_rank, spec.target_devices[-1])
        key = target, draft, rank if has_more_logits else None
        if key not in found:
            found[key] = _rank_memory(spec, hardware, rank, target, draft), []
        found[key][1].append(rank)
    return tuple(found.values())


def _rank_memory(spec: PlanSpec, hardware: HardwareConfig, rank: int, target: _Part, draft: _Part) -> RankMemoryPlan:
    num_slots = spec.batch_size * spec.num_slots
    both = (spec.target, target), (spec.draft, draft)
    held = [(model, part) for model, part in both if model and part is not _NOTHING]
    terms = spec.free_terms
    own_slots = terms.copied_slots and engine.whole_steps(terms.copied_slots + spec.round_positions)
    held_slots, held_rows = num_slots + spec.spare_rows * spec.num_slots, spec.batch_size + spec.spare_rows
    taps_bytes = held_rows * spec.tap_slots * spec.tap_bytes  # where a head reads them, or they are sent from
    uniforms = 3 * spec.num_draft_tokens * spec.drafts + 4
    # All that the rows can need, in fp64, twice while all rows are admitted at once.
    uniforms_bytes = 2 * 8 * spec.batch_size * (spec.max_new_tokens + 1) * uniforms
    served = {
        "target_weights_bytes": target.weights.total_bytes,
        "draft_weights_bytes": draft.weights.total_bytes,
        "target_cache_bytes": target.cache_bytes(held_slots, held_rows),
        "draft_cache_bytes": draft.cache_bytes(spec.draft_rows * spec.draft_slots, spec.draft_rows)
        + taps_bytes * (rank in spec.draft_ranks or spec.sends_taps or (spec.num_stages > 1 and target is not _NOTHING))
        + terms.held_bytes
        + target.cache_bytes(spec.batch_size * own_slots, 0) * terms.layers // spec.num_target_layers,
        "logits_bytes": _logits_bytes(spec, rank) + uniforms_bytes,
        "activations_bytes": max(_activation_bytes(spec, hardware, model, part) for model, part in held),
    }
    used = [model.storage.package for model, _ in held if hardware.device == "cpu"]
    packages = [package.process_bytes for package in used if package]
    context_bytes = hardware.context_bytes + max(packages, default=0)
    fixed = {
        "graphs_bytes": _graph_bytes(spec, hardware, drafts=draft is not _NOTHING) if spec.cuda_graphs else 0,
        "collectives_bytes": hardware.collective_bytes * _num_communicators(spec, rank),
        "context_bytes": context_bytes,
        "slack_bytes": int(SLACK_SHARE * sum(served.values())) if hardware.device == "cuda" else 0,
    }
    loading = target.weights.total_bytes + max(
        target.temporary_bytes, draft.weights.total_bytes + draft.temporary_bytes
    )
    return RankMemoryPlan(
        rank=rank,
        **served,
        **fixed,
        total_bytes=sum(served.values()) + sum(fixed.values()),
        loading_peak_bytes=loading + context_bytes + fixed["collectives_bytes"],
        capacity_bytes=hardware.rank_bytes,
        target_repeated_bytes=target.weights.repeated_bytes,
        draft_repeated_bytes=draft.weights.repeated_bytes,
        target_heads=target.num_heads,
    )


def _num_communicators(spec: PlanSpec, rank: int) -> int:
    """Number of groups of several ranks that this rank belongs to, for each of which NCCL keeps buffers from the start.

    The groups are all replicas, the rank's own replica, each stage of the target, the ranks of the draft, and each pair
    of ranks that sends from a stage to the next. Equal groups count once.
    """
    stages = spec.layout.stages
    pairs = (tuple(sorted(pair)) for both in pairwise(stages) for pair in zip(*both, strict=True))
    groups = {spec.layout.ranks, *stages, tuple(spec.draft_ranks), *pairs}
    of_replicas = spec.num_replicas > 1
    return of_replicas + sum(len(group) > 1 and rank in group for group in groups)


def _logits_bytes(spec: PlanSpec, rank: int) -> int:
    """Bytes of vocabulary-sized tensors of a round on this rank.

    Ranks of the target have logits (gathered, then in fp32), or parts of them, and run the rule on these. A rank that
    runs the rule has the probabilities of target and draft in fp32, one more copy if the rule keeps all rows, and one
    fp64 cumulative sum per row to draw from. Rules with penalties also count all tokens, and rules that draw by
    position hold random numbers. On a GPU, requests with settings of their own may all truncate and have penalties.
    Other ranks of the draft have its probabilities. If a draft without a model draws tokens, every rank has the whole
    distribution.
    """
    layout, positions = spec.layout, max(spec.round_positions, spec.scored_positions)
    size, vocabulary, num_draft_tokens = DTYPE_BYTES[spec.target.dtype], spec.target.shape.vocab_size, positions - 1
    scoring = layout.scoring_ranks
    num_copies, num_elsewhere = 2 * (len(scoring) > 1), 0
    if is_over_shards := spec.draws_over_shards[0] and not spec.scores_texts:
        num_copies, own = 1, len(vocabulary_parts(vocabulary, len(scoring))[0])
        vocabulary, num_elsewhere = own, vocabulary - own
    logits = positions * (num_copies * size + 4) if rank in scoring else 0
    logits += positions * size * (rank == spec.target_devices[-1] and rank not in spec.target_ranks)
    drafts = rank in spec.draft_ranks
    num_own = spec.draft_rows if drafts or not layout.splits_batch else 0
    decides = drafts if layout.splits_batch else rank == layout.verify_rank
    decides = decides or (is_over_shards and rank in scoring)
    whole = 4 * positions * rule_of(spec.rule).keeps_all_rows
    drawn = 4 * num_draft_tokens
    rule = 4 * positions + drawn + whole + 8 if decides else drawn * (drafts or spec.record.draws)
    rule += drafts * spec.vocabulary.logits_bytes
    if decides and spec.tree and not spec.is_certain:  # what is left of both models' rows at the nodes of a level
        rule += 4 * 3 * max((1, *spec.tree.read))
    if decides and spec.overlaps:  # probabilities in flight, while the next block's arrive
        rule += 4 * positions
    if decides:  # counts, penalized logits and a mask; the bits of a race and what is made of them
        rule += positions * (9 * spec.counts_tokens + 16 * rule_of(spec.rule).draws_by_position)
    if decides and spec.by_row and spec.device == "cuda":
        of_step, of_position = engine.STEPS_BYTES
        rule += (1 + spec.cuda_graphs) * (of_step * spec.drafts + of_position * positions)
    counted = spec.batch_size * num_elsewhere * (4 * positions * spec.counts_tokens + drawn * spec.record.draws)
    return vocabulary * (spec.batch_size * logits + num_own * rule) + counted


def _activation_bytes(spec: PlanSpec, hardware: HardwareConfig, model: PlannedModel, part: _Part) -> int:
    """Peak of a prefill chunk: the residual and its norm, attention or the MLP, and masks if attention needs them.

    If the attention of a round or of short prompts splits a sequence into parts, each part has its own sums in fp32.
    With masks, the lean decoder copies queries and attended values, and needs a line of the mask for each query of a
    group. Modules of transformers repeat keys and values for each head of a group. A cache format that attention cannot
    read is unpacked layer by layer, first keys and then values, through fp32. Three copies of a layer's states after
    the tokens of a round exist at once. For latents see `_latent_bytes`.
    """
    shape, size = model.shape, DTYPE_BYTES[model.dtype]
    positions = min(engine.PREFILL_CHUNK, spec.prompt_tokens)
    bucket = bucket_of(spec.prompt_tokens, spec.num_slots, hardware)
    record, heads_width = record_of(shape.model_type), part.num_heads * shape.head_dim
    group, attended, masks, repeated = shape.num_attention_heads // shape.num_key_value_heads, 2 * part.width, 0, 0
    parts_bytes = equal_bytes = sums_bytes = 0
    if model.reads_by_length(hardware):
        padded = -(-engine.short_size(spec.batch_size * spec.prompt_tokens) // spec.batch_size)
        positions = max(positions, padded)
        num_kv_heads = (part.width - heads_width) // (2 * shape.head_dim)
        num_parts = min(engine.most_parts(num_kv_heads), -(-spec.num_slots // engine.PART_SLOTS))
        parts_bytes = 4 * max(spec.round_positions, padded) * num_parts * part.num_heads * (shape.head_dim + 1)
        if spec.equal_bits:
            parts_bytes, equal_bytes = 0, _equal_parts_bytes(spec, model, num_kv_heads, positions=positions)
    else:
        pairs = min(positions * bucket, max(engine.MASKED_PAIRS, bucket))
        masks = pairs * record.attention_pair_bytes(num_heads=part.num_heads, value_bytes=size)
        if model.is_lean and hardware.device == "cuda":
            masks, attended = masks * group, max(attended, part.width + 3 * heads_width)
        elif not model.is_lean and group > 1 and not record.keeps_scores:
            repeated = 2 * bucket * heads_width * size
    if not shape.latent_width and (model.unpacks_cache(hardware) or (spec.tree and model.has_own_cache)):
        read = spec.num_slots if model.reads_by_length(hardware) else bucket
        repeated += read * (part.width - heads_width) * (size + 2)
    if shape.latent_width:
        of_latents = partial(_latent_bytes, model, part, hardware)
        # The last chunk of a prompt may be too short to expand them.
        most = engine.most_read(shape.latent_rank, shape.qk_nope_head_dim + shape.v_head_dim)
        last = int(min(positions, most))
        repeated += max(
            of_latents(num_slots=bucket, positions=positions, is_chunk=True),
            of_latents(num_slots=bucket, positions=last, is_chunk=True),
            of_latents(num_slots=spec.num_slots, positions=spec.round_positions, is_chunk=False),
        )
        if hardware.device == "cuda" and model.has_latent_kernel(hardware):
            of_sums = partial(_latent_sums_bytes, spec, model, part)
            sums_bytes = max(of_sums(bucket, last), of_sums(spec.num_slots, spec.round_positions))
    largest = max((kept.num_values for kept in inventory(shape).states), default=0)
    states_bytes = 3 * engine.STATE_VALUE_BYTES * spec.round_positions * largest
    wide = max(positions * attended * size + repeated, positions * 3 * part.units * size, parts_bytes, states_bytes)
    of_row = positions * 3 * shape.hidden_size * size + wide + masks
    return spec.batch_size * of_row + equal_bytes + sums_bytes + part.working_bytes


def _equal_parts_bytes(spec: PlanSpec, model: PlannedModel, num_kv_heads: int, *, positions: int) -> int:
    """Bytes of partial sums of rows with `reproducible=true`, for the groups of positions that are computed at once."""
    group = model.shape.num_attention_heads // model.shape.num_key_value_heads
    rows, num_parts = engine.equal_tile_rows(group), -(-spec.num_slots // engine.equal_part_slots(num_kv_heads))
    of_group = 4 * num_kv_heads * rows * num_parts * (model.shape.head_dim + 1)
    num_groups = spec.batch_size * -(-max(positions, spec.round_positions) // (rows // group))
    return min(num_groups, max(engine.EQUAL_PARTS_BYTES // of_group, 1)) * of_group


def _latent_sums_bytes(spec: PlanSpec, model: PlannedModel, part: _Part, num_slots: int, positions: int) -> int:
    """Bytes of the partial sums in fp32 of a GPU's latent attention, which splits a text into parts.

    The sums are those of all rows and positions, or of the positions that the kernel computes at a time, if fewer.
    """
    of_position = 4 * part.num_heads * engine.latent_parts(num_slots) * (model.shape.latent_rank + 1)
    return min(spec.batch_size * positions, max(engine.LATENT_SUMS_BYTES // of_position, 1)) * of_position


def _latent_bytes(
    model: PlannedModel, part: _Part, hardware: HardwareConfig, *, num_slots: int, positions: int, is_chunk: bool
) -> int:
    """Bytes that a layer makes of the latents of `num_slots` slots of a row.

    torch's operators make all scores, also in fp32. Operators of a device read rows as they are kept; for sums on a GPU
    see `_latent_sums_bytes`, and on a CPU queries and sums are in fp32. A chunk of a prompt copies the latents,
    and for torch a cache of fewer bits is unpacked. A chunk that expands them has keys without positions and values of
    all heads by one product, and whole keys. Where keys and values differ in width, CPUs have no fused attention: it
    copies the keys and keeps the scores, at last without the keys as scores, probabilities, and a byte for each.
    """
    shape, size, scored = model.shape, DTYPE_BYTES[model.dtype], 0
    copied = (is_chunk * size + model.has_own_cache * (size + 2)) * shape.latent_width
    if not expands_latents(shape, positions) and model.has_latent_kernel(hardware):
        kept = is_chunk * num_slots * model.slot_bytes(shape.num_key_value_heads) // model.num_attention_layers
        of_query = shape.latent_width + shape.latent_rank
        in_fp32 = of_query * (model.dtype.is_short and hardware.device == "cpu")
        return kept + part.num_heads * positions * (of_query * size + 4 * in_fp32)
    if not expands_latents(shape, positions):
        casts = size if size < 4 else 0
        return num_slots * (copied + part.num_heads * positions * (size + 4 + casts))
    key_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    if hardware.device == "cpu" and key_dim != shape.v_head_dim:
        scored = max(size * (key_dim + positions), (2 * size + 1) * positions)
    of_head = size * (shape.qk_nope_head_dim + shape.v_head_dim + key_dim) + scored
    return num_slots * (copied + part.num_heads * of_head)


def _graph_bytes(spec: PlanSpec, hardware: HardwareConfig, *, drafts: bool) -> int:
    """Bytes of captured graphs: plain forwards and rounds of the target, draft steps, and forwards of short prompts.

    If every model reads its cache by lengths, one graph serves all lengths. With masks each bucket has graphs, up to
    the number of buckets that have graphs at a time. If requests have settings of their own, each set of steps has
    graphs. No stage has more than `MOST_GRAPHS`.
    """
    by_length = all(model.reads_by_length(hardware) for model in (spec.target, spec.draft) if model)
    num_buckets = min(-(-spec.num_slots // engine.BUCKET_STEP[hardware.device]), engine.MOST_GRAPHED_BUCKETS)
    num_buckets = 1 if by_length else num_buckets
    num_short = len(engine.SHORT_PROMPTS) * (by_length and spec.prompt_tokens <= engine.SHORT_PROMPTS[-1])

    def num_nodes(num_layers: int, ranks: tuple[int, ...]) -> int:
        has_nccl = len(ranks) > 1 and not spec.takes_own_sums(hardware, ranks)
        return num_layers * (spec.kernels.layer + has_nccl * NCCL_NODES)

    num_layers, ranks = max(map(len, spec.stages)), spec.layout.scoring_ranks
    num_groups = min(spec.num_groups or 1, spec.batch_size)  # a graph of a round has the forwards of all
    num_each = num_buckets * (engine.sets_of_steps(spec.batch_size) if spec.by_row else 1)
    num_rounds = len(spec.lengths) * spec.drafts
    num_verified = min(num_each * (1 + num_rounds), engine.MOST_GRAPHS)
    nodes = (num_verified * num_groups + num_buckets * num_short) * num_nodes(num_layers, ranks)
    if spec.draft and drafts:
        ranks = spec.draft_ranks[:1] if spec.layout.splits_batch else spec.draft_ranks
        num_forwards = num_rounds if spec.drafts_in_one_pass else sum(spec.lengths)
        num_forwards = min(num_each * num_rounds, engine.MOST_GRAPHS) * num_forwards // num_rounds
        num_forwards += num_buckets * num_short * (not spec.has_head)
        nodes += num_forwards * num_nodes(spec.draft.shape.num_hidden_layers, ranks)
    return nodes * GRAPH_NODE_BYTES


def bucket_of(num_tokens: int, num_slots: int, hardware: HardwareConfig) -> int:
    """Cache slots that a forward reads if `num_tokens` of a row are filled."""
    step = engine.BUCKET_STEP[hardware.device]
    return min(-(-num_tokens // step) * step, num_slots)


def kv_bytes_per_token(model: PlannedModel) -> int:
    """Keys and values of one token in all layers, over all ranks."""
    return model.slot_bytes(model.shape.num_key_value_heads)


def fits(spec: PlanSpec, hardware: HardwareConfig) -> bool:
    """Whether the spec can be laid out, and every rank has enough memory."""
    return _free_bytes(spec, hardware) >= 0


def _free_bytes(spec: PlanSpec, hardware: HardwareConfig) -> float:
    """Free bytes of the fullest rank; minus infinity for a spec that cannot be laid out."""
    try:
        return fullest_rank(spec, hardware).free_bytes
    except PlacementError:
        return -math.inf


def largest_batch(spec: PlanSpec, hardware: HardwareConfig, *, limit: int = 4096) -> int:
    """The largest batch that fits at this context; 0 if none does."""
    return _most_that_fit(lambda rows: replace(spec, batch_size=rows), hardware, limit)


def largest_context(spec: PlanSpec, hardware: HardwareConfig) -> int:
    """The longest row (prompt and new tokens) that fits at this batch size and in the context."""
    limit = spec.target.shape.max_position_embeddings - spec.max_new_tokens
    prompt = _most_that_fit(lambda tokens: replace(spec, prompt_tokens=tokens), hardware, limit)
    return prompt + spec.max_new_tokens if prompt else 0


def _most_that_fit(spec_of: Callable[[int], PlanSpec], hardware: HardwareConfig, limit: int) -> int:
    """The largest number up to `limit` whose spec fits; 0 if none.

    The bytes grow almost linearly with the number. Each step interpolates between both ends to where no byte is free;
    every third step bisects.
    """
    low, high = min(limit, 1), limit
    free, lacking = _free_bytes(spec_of(low), hardware), _free_bytes(spec_of(high), hardware)
    if lacking >= 0 or free < 0:
        return high if lacking >= 0 else 0
    halves = cycle((False, False, True))
    while high - low > 1:
        share = 0.5 if next(halves) or math.isinf(lacking) else free / (free - lacking)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        found = _free_bytes(spec_of(middle), hardware)
        low, high, free, lacking = (middle, high, found, lacking) if found >= 0 else (low, middle, free, found)
    return low

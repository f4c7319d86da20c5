"""Facts about the engine that both the planner and the engine use: sizes of caches and chunks, numbers of kernels."""

import math
from dataclasses import dataclass

PREFILL_CHUNK = 512  # Tokens of a prompt that go through a model at once, so that memory and masks stay bounded.
MASKED_PAIRS = 2**24
"""The most queries and slots of a chunk whose attention takes masks, or keeps scores: whole chunks up to 32k slots."""
SHORT_PROMPTS = (8, 16, 32, 64, 128)
"""Tokens of prompts that a forward of one shape reads, where attention goes by lengths: a CUDA graph each."""
_MOST_SCORED = 2**26  # Logits of a forward that scores whole texts, 256 MiB in fp32.
SLOT_STEP = 8  # Cache slots are multiples of it: attention kernels copy masks of any other width first.
BUCKET_STEP = {"cuda": 256, "cpu": 64}
"""Steps by device: caches are read at widths that are multiples. Wider on GPUs, where each width is a graph."""
MOST_GRAPHED_BUCKETS = 16
"""Buckets that have CUDA graphs at a time, the latest that rounds have read: a long text passes through hundreds."""
MOST_GRAPHS = 64
"""CUDA graphs of a stage at a time, the latest that were replayed; all lengths of drafts are timed before a run."""
ROWS_WITH_STEPS = (2, 16, 128, 1024)
"""Numbers of rows for which there are steps of drawing that only some rows need (`sampling.by_row`).

If more rows than the last number need them, the steps are taken for all rows.
"""
STEPS_BYTES = 37, 52
"""Bytes that these steps take on a GPU for all rows, in a draft's step and at each scored position, for each token of
the vocabulary: once in the pool of graphs, and as many in the first round of a set of steps, which is no graph yet.

The caching allocator of a stub device reserved 2 * 37 + 2 * 52 * (K + 1) in 40 mixtures of 32 rows, within 1 % for
K = 3, 4 and 8.
"""
LANES = 16
"""Numbers of a vector of the compiled kernels of CPUs; attention is compiled for heads of whole vectors."""
WHOLE_LAYER_TOKENS = 144
"""The most tokens of a forward on a CPU whose layers are one operator, a short prompt or a round of 16 rows and K = 8.

More take an operator for each product, which is as fast.
"""
LARGEST_HEAD_BY_LENGTH, FIRST_CAPABILITY_BY_LENGTH = 256, 8.0
"""The most dimensions of a head, and the first compute capability, that attention by lengths runs on."""
PART_SLOTS, ROW_PROGRAMS = 16, 256
"""The least slots of a part of a row, each with its own program on a GPU, and about the most programs of a row.

On an H200, 5 queries over 2048 slots of 32 heads took 25 us with 128 programs, 17 with 256, 15 with 512; and 32 rows
of 1000 slots and 8 key-value heads took 48, 52 and 74.
"""
LATENT_PARTS, LATENT_QUERIES = (64, 64, 512), 32
"""The parts into which attention to latents on a GPU cuts a text: the number of short ones, their slots, and the slots
of the longer ones after them; and the most queries of a program that reads a part."""
LATENT_SUMS_BYTES = 2**28
"""Sums of these parts that are kept at once: a prompt's last tokens, read in many rows, would take gigabytes."""
EQUAL_PARTS_BYTES, _EQUAL_ROWS = 2**26, 32
"""Sums of attention with `reproducible=true` on a GPU that are kept at once, and the rows of its tiles.

Derived, not measured: a GPU's second cache holds most of the former, and the latter are the positions of a round by 4
to 8 queries of a key-value head.
"""
OWN_SUM_BYTES, OWN_SUM_RANKS = 2**18, 8
"""The most bytes of a sum by the program's own kernel, beyond which a ring sends fewer, and the most ranks."""
SOFTMAX_TOKENS = 1024
"""Tokens of a program of the softmax on a GPU: few programs a row, since each reads the sums of all of them."""
LEAST_SHARED_BYTES = 2**22
"""Logits of a round in fp32 from which on ranks draw over shards: a gather of fewer costs less than more messages."""


def masked_chunk(chunk: int, num_slots: int) -> int:
    """Tokens of a chunk of a prompt that are read at once by attention with masks over `num_slots`: halves of it."""
    while chunk > 1 and chunk * num_slots > MASKED_PAIRS:
        chunk //= 2
    return chunk


def expands_latents(num_positions: int, *, rank: int, made: int) -> bool:
    """Whether attention of a chunk makes keys and values of the latents of all slots, rather than reading latents.

    A latent has `rank` numbers, a head's key without positions and its value `made` numbers together. For a query and a
    slot, reading takes twice 2 `rank` operations and keys and values twice `made`; to make these of a slot takes twice
    `rank` times `made`. A chunk's own tokens alone decide, so that its bits depend on no other row's length.
    """
    return num_positions > most_read(rank, made)


def most_read(rank: int, made: int) -> float:
    """The most positions of a chunk whose attention reads latents; see `expands_latents`."""
    return rank * made // (2 * rank - made) if 2 * rank > made else math.inf


def latent_parts(num_slots: int, parts: tuple[int, int, int] = LATENT_PARTS) -> int:
    """The number of parts of a text; see `LATENT_PARTS`."""
    number, short, long = parts
    return -(-min(num_slots, number * short) // short) - (-max(num_slots - number * short, 0) // long)


STATE_VALUE_BYTES = 4  # Recurrent states are in fp32, whatever the model is in.


def saves_states(num_slots: int) -> bool:
    """Whether rows of `num_slots` have room for the state after whole chunks of a prompt; see `engine.held`."""
    return num_slots > PREFILL_CHUNK


def kept_inputs(num_kept: int, width: int) -> int:
    """Inputs of a convolution over `width` tokens that a row keeps, to go back as far as its `num_kept` states.

    A forward of `num_kept` tokens overwrites no input before it, which other programs of a kernel may still read.
    """
    return num_kept + width - 1


def most_drafted_for(context: int, num_steps: int) -> int:
    """The longest text that a draft of this context drafts `num_steps` tokens for, in sequence."""
    return max(context - num_steps + 1, 2)


def window_slots(num_kept: int, num_drafted: int) -> int:
    """Cache slots of a row of a draft that keeps `num_kept` tokens, with room for what it reads at once and drafts."""
    return whole_steps(num_kept + CATCH_UP_CHUNK + num_drafted + 1)


def tap_slots(num_kept: int, num_drafted: int, *, num_slots: int) -> int:
    """Slots of a row's taps for a head that keeps `num_kept` pairs, of a target with `num_slots`.

    A head that begins anew reads the window before the K + 1 newest pairs, while rounds write as many beyond them; rows
    of texts that have ended may be two rounds further. One slot takes what is not read.
    """
    return min(num_kept + 4 * (num_drafted + 1) + 3, num_slots + 1)


CATCH_UP_CHUNK = 64  # Tokens that a draft model reads at once after rounds in which it did not draft.


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The number of kernels of an engine without collectives; each takes `HardwareConfig.kernel_s` in a CUDA graph."""

    layer: int  # at few rows, products and attention included
    library_layer: int  # of the library's modules
    frame: int  # a forward without its layers: embedding, rotary angles, last norm, head and its conversion to fp32
    draw: int  # a sampled draw
    verify: int  # a verification with commit
    recurrent_layer: int = 120  # of the library's modules, with a recurrent state
    plain: int = 0  # a plain round beyond its forward and draw
    head: int = 0  # a step of a draft head beyond a draft model's


ENGINE_KERNELS = Kernels(layer=10, library_layer=50, frame=8, draw=8, verify=38)
"""Launches of this engine: a stub device counted layers' and draws', torch's dispatcher the rest."""
CPU_KERNELS = Kernels(layer=10, library_layer=50, frame=8, draw=11, verify=65, plain=35, head=15)
"""Operators of this engine on a CPU, which torch's profiler counted; some 20 take as long as a round of the host."""


def reads_by_length(*, capability: float, value_bytes: int, head_dim: int, rounds_inputs: bool) -> bool:
    """Whether the lean decoder's attention reads rows by their lengths; elsewhere it needs masks.

    `capability` is the compute capability of an NVIDIA GPU, 0 for AMD GPUs and CPUs.
    """
    is_narrow = value_bytes == 2
    has_head = head_dim % 8 == 0 and head_dim <= LARGEST_HEAD_BY_LENGTH
    return capability >= FIRST_CAPABILITY_BY_LENGTH and is_narrow and has_head and not rounds_inputs


def most_parts(num_kv_heads: int) -> int:
    """The most parts of a row whose slots the lean decoder's attention splits over programs, a power of 2."""
    return 1 << math.ceil(math.log2(max(ROW_PROGRAMS / num_kv_heads, 1)))


def equal_part_slots(num_kv_heads: int) -> int:
    """The slots of every part of a row with `reproducible=true`: 256 programs of a row of 2048 slots, as above."""
    return min(max(8 << math.ceil(math.log2(num_kv_heads)), PART_SLOTS), ROW_PROGRAMS)


def equal_tile_rows(group: int) -> int:
    """Return the rows of a tile with `reproducible=true`: a power of 2, with all `group` queries of each position."""
    return max(_EQUAL_ROWS, 1 << math.ceil(math.log2(group)))


def sets_of_steps(batch_size: int) -> int:
    """Return how many sets of steps rounds have as CUDA graphs, in batches of requests; see `sampling.by_row`."""
    return 2 + 2 * (1 + sum(rows < batch_size for rows in ROWS_WITH_STEPS))


def short_size(num_tokens: int) -> int:
    """The size of `SHORT_PROMPTS` that reads `num_tokens`; 0 if none does."""
    return next((size for size in SHORT_PROMPTS if size >= num_tokens), 0)


def whole_steps(num_slots: int) -> int:
    """Round a number of slots up to `SLOT_STEP`."""
    return -(-num_slots // SLOT_STEP) * SLOT_STEP


def scored_positions(batch_size: int, vocab_size: int) -> int:
    """Positions of a forward that scores whole texts, as many as have `_MOST_SCORED` logits."""
    return max(1, min(PREFILL_CHUNK, _MOST_SCORED // (batch_size * vocab_size)))


def draft_slots(num_slots: int, *, slots_per_slot: int, max_position_embeddings: int) -> int:
    """Slots of a draft whose target has `num_slots`, as far as the draft's positions go."""
    positions = max_position_embeddings // SLOT_STEP * SLOT_STEP
    return max(min(num_slots * slots_per_slot, positions), num_slots)

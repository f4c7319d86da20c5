"""Sizes that the engine uses and the planner prices, and the kernels that it launches on a GPU."""

from dataclasses import dataclass

PREFILL_CHUNK = 512  # Tokens of a prompt that go through a model at once, so that memory and masks stay bounded.
SLOT_STEP = 8  # Cache slots are multiples of it: attention kernels copy masks of any other width first.
BUCKET_STEP = {"cuda": 256, "cpu": 64}
"""By device: the widths at which a cache is read are multiples of it. Wider on GPUs, where each width is a graph."""
WHOLE_LAYER_TOKENS = 16
"""The most tokens of a forward on a CPU whose layers are one operator each; more take one for each product."""
PAGE_SLOTS = 256  # Slots of a page, as attention by lengths reads the cache; see `models.llama.attention`.
LARGEST_PAGED_HEAD, FIRST_PAGED_CAPABILITY = 256, 8.0
"""The most dimensions of a head, and the first compute capability, that attention by lengths runs on."""
MOST_PIECES = 4  # The most tokens of a draft with its own tokenizer that spell one token of the target.
OWN_SLOTS_PER_SLOT = 2
"""Cache slots of such a draft per slot of the target; its text has at most so many tokens per token of the target."""

CATCH_UP_CHUNK = 64  # Tokens that a draft model reads at once after rounds in which it did not draft.


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The number of kernels of an engine without collectives; each takes `HardwareConfig.kernel_s` in a CUDA graph."""

    layer: int  # at few rows, products and attention included
    frame: int  # a forward without its layers: embedding, rotary angles, last norm, head and its conversion to fp32
    draw: int  # a sampled draw
    verify: int  # a verification with commit


ENGINE_KERNELS = Kernels(layer=10, frame=8, draw=8, verify=38)
"""Of this engine: the budgets of `benchmarks.gpu_nodes` for a layer and a draw, the others from torch's dispatcher."""


def reads_by_length(*, capability: float, value_bytes: int, head_dim: int, rounds_inputs: bool) -> bool:
    """Whether the lean decoder's attention reads rows by their lengths, in pages; elsewhere it needs masks.

    `capability` is the compute capability of an NVIDIA GPU, 0 for AMD GPUs and CPUs.
    """
    is_narrow = value_bytes == 2  # noqa: PLR2004 - bytes
    has_head = head_dim % 8 == 0 and head_dim <= LARGEST_PAGED_HEAD
    return capability >= FIRST_PAGED_CAPABILITY and is_narrow and has_head and not rounds_inputs


def whole_steps(num_slots: int) -> int:
    """Round a number of slots up to `SLOT_STEP`."""
    return -(-num_slots // SLOT_STEP) * SLOT_STEP


def whole_pages(num_slots: int) -> int:
    """Round a number of slots up to `PAGE_SLOTS`."""
    return -(-num_slots // PAGE_SLOTS) * PAGE_SLOTS


def own_slots(num_slots: int, *, max_position_embeddings: int) -> int:
    """Slots of a draft with its own tokenizer whose target has `num_slots`, as far as the draft's positions go."""
    positions = max_position_embeddings // SLOT_STEP * SLOT_STEP
    return max(min(num_slots * OWN_SLOTS_PER_SLOT, positions), num_slots)

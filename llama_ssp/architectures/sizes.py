"""Sizes that the engine uses and the planner prices."""

PREFILL_CHUNK = 512
"""Tokens of a prompt that go through a model at once, so that memory and masks stay bounded."""
SLOT_STEP = 8
"""Cache slots are multiples of it: attention kernels copy masks of any other width first."""
BUCKET_STEP = {"cuda": 256, "cpu": 64}
"""By device: the widths at which a cache is read are multiples of it. Wider on GPUs, where each width is a graph."""

CATCH_UP_CHUNK = 64
"""Tokens that a draft model reads at once after rounds in which it did not draft."""


def whole_steps(num_slots: int) -> int:
    """Round a number of slots up to `SLOT_STEP`."""
    return -(-num_slots // SLOT_STEP) * SLOT_STEP

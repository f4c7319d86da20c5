"""Which errors of a GPU end a run: a way around them would meet a device that is lost, or one that is full."""

from llama_ssp.distributed.memory import exhaustion

_LOST = frozenset({214, 700, 702, 710, *range(714, 720), 721})
"""CUDA's codes after which every further call fails: such as 214, ECC, and 700, an illegal access."""
_LOST_WORDS = ("illegal memory access", "misaligned address", "illegal instruction", "unspecified launch failure")
"""What Triton says instead of a code."""


def ends_run(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, leaves no other way to go on."""
    if error is None:
        return False
    is_lost = getattr(error, "error_code", None) in _LOST or any(words in str(error) for words in _LOST_WORDS)
    return is_lost or exhaustion(error) is not None or ends_run(error.__cause__ or error.__context__)

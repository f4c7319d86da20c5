"""Forecasts the time of sums and messages between ranks, and lists the messages of a round.

Messages between the ranks of one replica in a round, in addition to the collectives inside the models:

    ids              the drafted ids to all ranks, before the target's forward; a replicated draft gathers the rows of
                     each rank
    probabilities    from the draft to the rank that runs the rule, only if no rank holds both models
    hidden           from each stage of a target to the next one, of all ranks of a stage together
    verdict          number of accepted tokens, the next token, and the stop request
"""

import math
from bisect import bisect_right
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from llama_ssp.architectures import engine
from llama_ssp.machines.hardware import MEASURED, HardwareConfig, MeasuredSum
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.rules import rule_of

ID_BYTES = 8
VERDICT_BYTES = 3 * ID_BYTES  # of a row
PROBABILITY_BYTES = 4


def all_reduce_s(hardware: HardwareConfig, ranks: tuple[int, ...], num_bytes: float, *, is_own: bool = False) -> float:
    """Return the seconds of an all-reduce: within each node, then between nodes. An all-gather moves half of the bytes.

    A ring of n ranks sends 2 (n - 1) / n times the bytes over every link. A latency that is an estimate is that of two
    GPUs of a node, and counts log2(n) times for n GPUs, as in NCCL. A measured time replaces the ring of a node; with
    `is_own`, the time of the program's kernel if that takes `num_bytes`.
    """
    num_nodes = len({rank // hardware.num_gpus for rank in ranks})
    inside = -(-len(ranks) // num_nodes)
    seconds = _measured_s(hardware, inside, num_bytes, is_own=is_own and num_bytes <= engine.OWN_SUM_BYTES) or 0.0
    own = None if seconds else hardware.link
    for link, size, sent in (own, inside, num_bytes), (hardware.network, num_nodes, num_bytes / inside):
        if link and size > 1:
            grows = link is own and hardware.sources.get("link.latency_s", "").startswith("estimate")
            seconds += link.latency_s * (math.log2(size) if grows else 1)
            seconds += 2 * (size - 1) / size * sent / link.bandwidth_bytes_per_s
    return seconds


def guesses_sums(hardware: HardwareConfig, ranks: tuple[int, ...]) -> bool:
    """Whether no sum over these ranks was measured, neither on this machine nor on GPUs of its kind."""
    if len(ranks) == 1 or hardware.device != "cuda":
        return False
    if ranks[0] // hardware.num_gpus != ranks[-1] // hardware.num_gpus:
        return hardware.sources.get("network") != MEASURED
    return not (hardware.is_measured or hardware.sums)


def _measured_s(hardware: HardwareConfig, num_ranks: int, num_bytes: float, *, is_own: bool = False) -> float | None:
    """Return the seconds of a sum inside a node, measured on the nearest number of ranks; None if none was measured.

    Between measured sizes the time is interpolated. Outside of them the nearest segment is extended, but a larger sum
    takes no less than the largest measured one, and a smaller sum no less than 0.
    """
    if num_ranks == 1 or not (measured := _sums_of(hardware, num_ranks, is_own=is_own)):
        return None
    if len(measured) == 1:  # the time of a small sum, and of further bytes on the links
        # A rank of the program's kernel reads the parts of all others.
        (small,), share = measured, num_ranks - 1 if is_own else 2 * (num_ranks - 1) / num_ranks
        return small.s + share * max(num_bytes - small.num_bytes, 0) / hardware.link.bandwidth_bytes_per_s
    start = max(bisect_right(measured, num_bytes, hi=len(measured) - 1, key=attrgetter("num_bytes")) - 1, 0)
    low, high, last = measured[start], measured[start + 1], measured[-1]
    seconds = low.s + (high.s - low.s) * (num_bytes - low.num_bytes) / (high.num_bytes - low.num_bytes)
    return max(seconds, last.s if num_bytes > last.num_bytes else 0.0)


@lru_cache(maxsize=256)
def _sums_of(hardware: HardwareConfig, num_ranks: int, *, is_own: bool) -> list[MeasuredSum]:
    """Measured sums of the nearest number of ranks, by size; none of a machine without any."""
    sums = hardware.own_sums if is_own else hardware.sums
    numbers = sorted({found.num_ranks for found in sums}, key=lambda number: (abs(number - num_ranks), -number))
    return [found for found in sums if found.num_ranks == numbers[0]]


def message_s(hardware: HardwareConfig, ranks: tuple[int, ...], num_bytes: float) -> float:
    """One message from a rank to others: a broadcast of ids, or a residual for the next device."""
    if len(ranks) == 1:
        return 0.0
    apart = min(ranks) // hardware.num_gpus != max(ranks) // hardware.num_gpus
    if not apart and (measured_s := _measured_s(hardware, len(ranks), num_bytes)):
        return measured_s
    link = hardware.network if apart and hardware.network else hardware.link
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


class Message(NamedTuple):
    """One kind of message of a round: `num_bytes` of one sender to all others, or of all ranks among each other."""

    num_bytes: int
    ranks: tuple[int, ...]

    @property
    def received_bytes(self) -> int:
        """Bytes received in a round, over all ranks."""
        return self.num_bytes * (len(self.ranks) - 1)


def round_messages(spec: PlanSpec, num_draft_tokens: int) -> dict[str, Message]:
    """The messages of a round with K = `num_draft_tokens`, by kind, in order; a plain token has only the verdict."""
    layout = spec.layout
    if len(layout.ranks) == 1:
        return {}
    drafts = bool(spec.draft) and num_draft_tokens > 0
    rows = spec.draft_rows * len(layout.ranks) if drafts and layout.splits_batch else spec.batch_size
    found = {}
    if drafts and spec.sends_taps:
        found["taps"] = Message(rows * (spec.draft_depth + 1) * spec.tap_bytes, layout.ranks)
    if drafts:
        with_parents = 2 if spec.tree and spec.tree.is_dynamic else 1
        found["ids"] = Message(with_parents * ID_BYTES * rows * num_draft_tokens, layout.ranks)
    has_probs = rule_of(spec.rule).needs_probs and not spec.is_certain
    if drafts and layout.is_apart and has_probs:
        num_probs = 1 + sum(spec.tree.read) if spec.tree else num_draft_tokens
        num_bytes = PROBABILITY_BYTES * rows * num_probs * spec.target.shape.vocab_size
        found["probabilities"] = Message(num_bytes, (layout.draft_source_rank, layout.verify_rank))
    if spec.num_stages > 1:
        positions = num_draft_tokens + 1 - (spec.overlaps and num_draft_tokens > 0)
        found["hidden"] = Message(spec.batch_size * positions * sum(spec.hop_bytes), (0, 1))
    found["verdict"] = Message(VERDICT_BYTES * rows, layout.ranks)
    return found

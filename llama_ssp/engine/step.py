"""Runs one round with an executor: drafting, then verification, or both at once."""

from torch import Tensor

from llama_ssp.engine.clock import Clock
from llama_ssp.engine.overlap import OverlappedExecutor, overlapped_step
from llama_ssp.engine.round import Block, DraftChoice, Executor
from llama_ssp.engine.state import BatchState


def step(
    executor: Executor | OverlappedExecutor,
    state: BatchState,
    block: Block | None,
    *,
    choice: DraftChoice,
    bucket: int,
    clock: Clock,
    refills: bool = False,
) -> tuple[Tensor, Block | None]:
    """Run one round on a batch whose rows have at least two tokens.

    Args:
        executor: runs its pieces.
        state: the batch.
        block: drafted ahead by the previous round; None drafts now.
        choice: how to draft, if there is no block.
        bucket: number of cache slots to read, at least the longest row's length + K.
        clock: times the pieces.
        refills: see `overlapped_step`.

    Returns:
        The round's result (see `BatchState.commit`), and the block drafted ahead for the next round: None if the
        executor does not draft while the target verifies.
    """
    clock.start()
    if isinstance(executor, OverlappedExecutor):
        return overlapped_step(executor, state, block, choice=choice, bucket=bucket, clock=clock, refills=refills)
    if block is None and choice.num_tokens:
        block = executor.draft(state, choice=choice, bucket=bucket)
        clock.lap("draft")
    result = executor.verify(state, block, bucket=bucket)
    clock.lap("verify")
    return result, None

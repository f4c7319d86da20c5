"""Runs overlapped rounds as CUDA graphs (see `cuda_graph`), whose messages follow the forward.

    a rank of the target       | draft* | score_flight ............. | exchange | settle | keep |
    a rank of the draft        | draft ....................... | exchange       | settle | keep |

    *) the uniforms of the round alone

A graph writes its results to the same addresses in every round. Of the block that a round has drafted, the next round
needs the probabilities while it receives those of its own block. So `keep` copies them to a second place, once the
decision has been sent.

    probabilities    exchange ----> | following | -- settle reads both, then keep --> | in flight |

Shapes: B sequences, K drafted tokens, T = K + 1, V vocabulary.
"""

from functools import partial

from torch import Tensor

from llama_ssp.engine.executors.cuda_graph import Graphs, Recorder
from llama_ssp.engine.overlap import OverlappedExecutor, OverlappedRound
from llama_ssp.engine.round import Block, DraftChoice
from llama_ssp.engine.state import BatchState


class CudaOverlap(OverlappedExecutor):
    """Replays the pieces of an overlapped round as graphs; see `OverlappedExecutor`."""

    keeps_state = True

    def __init__(self, round_: OverlappedRound, *, recorder: Recorder) -> None:
        self._round = round_
        self._graphs = Graphs(round_, recorder)
        self._in_flight: Tensor | None = None

    @property
    def failed(self) -> bool:
        """See `Graphs`."""
        return self._graphs.failed

    @property
    def drafts_here(self) -> bool:
        """See `OverlappedExecutor`."""
        return self._round.drafts_here

    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """See `OverlappedExecutor`."""
        self._bucket = bucket
        piece = partial(self._round.draft, state, choice=choice, bucket=bucket)
        return self._graphs.run(("draft", choice, bucket), piece, state)

    def score_flight(self, state: BatchState, *, num_drafted: int, bucket: int) -> Tensor:
        """See `OverlappedExecutor`."""
        piece = partial(self._round.score_flight, state, num_drafted=num_drafted, bucket=bucket)
        return self._graphs.run(("score", num_drafted, bucket), piece, state)

    def exchange(self, state: BatchState, block: Block) -> Block:
        """See `OverlappedExecutor`."""
        piece = partial(self._round.exchange, state, block)
        return self._graphs.run(("exchange", block.choice, self._bucket), piece, state)

    def refill(self, state: BatchState, before: Block | None, fresh: Block) -> Block:
        """See `OverlappedExecutor`."""
        kept = self._kept(before, fresh)

        def piece() -> None:
            _copy_probs(self._round.refill(state, kept, fresh), kept)

        self._graphs.run(("refill", fresh.choice, self._bucket), piece, state)
        return kept

    def settle(
        self, state: BatchState, before: Block | None, following: Block, target_BKV: Tensor
    ) -> tuple[Tensor, Block]:
        """See `OverlappedExecutor`."""
        kept = self._kept(before, following)

        def piece() -> Tensor:
            result, in_flight = self._round.settle(state, kept, following, target_BKV)
            _copy_probs(in_flight, kept)
            return result

        return self._graphs.run(("settle", following.choice, self._bucket), piece, state), kept

    def _kept(self, before: Block | None, block: Block) -> Block:
        """What is in flight: before the first round a block whose values do not count.

        It stays where it is, also when graphs are dropped.
        """
        if before is not None or block.probs_BWV is None:
            return before or block
        batch_size, _, vocab_size = block.probs_BWV.shape
        shape = batch_size, self._round.num_ahead + 2, vocab_size
        if self._in_flight is None or self._in_flight.shape != shape:
            self._in_flight = block.probs_BWV.new_zeros(shape)
        return block._replace(probs_BWV=self._in_flight)


def _copy_probs(block: Block, place: Block) -> None:
    if block.probs_BWV is not None and place.probs_BWV is not None:
        place.probs_BWV.copy_(block.probs_BWV)

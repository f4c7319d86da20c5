"""A draft model replicated on several ranks: each rank drafts for its share of the batch's rows.

A rank has the draft's probabilities of its own rows and the target's logits of all rows, so it also verifies its own
rows (see `engine.verifier`), and no probabilities are sent between ranks. Drafted ids are gathered before the target's
forward, decisions after it. Each rank has a contiguous range of rows, which is empty on some ranks of a small batch.

    7 rows on 3 ranks   | 0 1 | 2 3 | 4 5 6 |

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, P = 2 uniforms per draw, W = K + 1, V
vocabulary, X numbers of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_ssp.distributed.comms import Comm
from llama_ssp.drafting.protocol import Drafter, SharedDrafter
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.sampling.context import Rows
from llama_ssp.sampling.rules import Draft
from llama_ssp.shapes import static_shape


class BatchSplit:
    """Assigns rows to ranks and gathers the rows of all ranks.

    Args:
        comm: the ranks that receive all rows.
        ranks: the ranks in `comm` that have rows, increasing.
    """

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        self._comm = comm
        self._places = {rank: place for place, rank in enumerate(ranks)}

    def own_rows(self, batch_size: int) -> range:
        """Return the rows of this rank."""
        return self._of(self._comm.rank, batch_size)

    def gather(self, own_RX: Tensor, *, batch_size: int) -> Tensor:
        """Gather the rows (B, X) of all ranks on every rank."""
        width = static_shape(own_RX)[1]
        widths = tuple(len(self._of(rank, batch_size)) * width for rank in range(self._comm.size))
        return self._comm.all_gather_last(own_RX.flatten(), widths).view(batch_size, width)

    def _of(self, rank: int, batch_size: int) -> range:
        if rank not in self._places:
            return range(0)
        place, num_ranks = self._places[rank], len(self._places)
        return range(batch_size * place // num_ranks, batch_size * (place + 1) // num_ranks)


class BatchSplitDrafter(SharedDrafter):
    """Combines the drafters of several ranks."""

    def __init__(
        self, inner: Drafter | None, *, split: BatchSplit, num_draft_tokens: int, device: torch.device
    ) -> None:
        super().__init__(inner, num_draft_tokens=num_draft_tokens, device=device)
        self._split = split

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate caches for this rank's rows."""
        self._own = self._split.own_rows(batch_size)
        if self._own:
            super().allocate(batch_size=len(self._own), num_slots=num_slots)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read the new prompts that become rows of this rank."""
        mine = [place for place, row in enumerate(rows) if row in self._own]
        if mine:
            own_rows = [rows[place] - self._own.start for place in mine]
            super().prefill(prompts.some(mine), rows=own_rows, buckets=buckets)

    def propose(self, rows: Rows, *, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft this rank's rows and gather the ids of all; the probabilities are those of its own rows only."""
        (batch_size, num_drafted, _), start, stop = static_shape(uniforms_BKP), self._own.start, self._own.stop
        ids_RK, probs_RWV = rows.lengths_B.new_empty(0, num_drafted), None
        if self._inner and self._own:
            own, uniforms_RKP = rows.part(start, stop), uniforms_BKP[start:stop]
            ids_RK, probs_RWV = self._inner.propose(
                own, uniforms_BKP=uniforms_RKP, num_unread=num_unread, bucket=bucket
            )
        ids_BK = self._split.gather(ids_RK, batch_size=batch_size)
        self._write(ids_BK, rows)
        return Draft(ids_BK, probs_RWV)

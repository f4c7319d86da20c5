"""A draft model whose context is shorter than its target's: longer rows go on without it.

Such a row is drafted for as if it ended within the context, so that shapes stay the same, and the verifier draws its
next token as in plain decoding, whatever was drafted. Its text depends on no other row.

    text, context of the draft 8, K = 3     | 0 1 2 3 4 5 | d d d |      the longest that is drafted for
                                            | 0 1 2 3 4 5 6 | x          goes on plainly

Shapes: B sequences, S slots, K drafted tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.settings.drafters import most_drafted_for
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Draft


class LimitedDrafter:
    """Keeps a drafter within its model's context; `depth` is that of its trees, None for chains."""

    def __init__(self, inner: Drafter, context: int, *, depth: int | None, device: torch.device) -> None:
        self._inner, self._context, self._depth = inner, context, depth
        self.num_draft_tokens = inner.num_draft_tokens
        self.repeats_operators, self.reads_by_length = inner.repeats_operators, inner.reads_by_length
        self._offsets_K = torch.arange(inner.num_draft_tokens, device=device)

    @property
    def num_allocations(self) -> int:
        """See `Drafter`."""
        return self._inner.num_allocations

    def longest(self, num_tokens: int) -> int:
        """The longest rows that a round of K tokens drafts for."""
        return most_drafted_for(self._context, self._depth or num_tokens)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """See `Drafter`."""
        self._inner.allocate(batch_size=batch_size, num_slots=num_slots)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read the beginnings of new prompts."""
        most = self._context
        self._inner.prefill(
            Prompts(
                prompts.tokens_RS, prompts.lengths_R.clamp_max(most), [min(length, most) for length in prompts.lengths],
                min(prompts.longest, most),
                # A prompt that is cut is no longer equal to another one.
                [held if length <= most else held._replace(num_tokens=min(held.num_tokens, most - 1))
                 for held, length in zip(prompts.held, prompts.lengths, strict=False)],
            ),
            rows=rows, buckets=buckets,
        )  # fmt: skip

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft for every row, or for its beginning; see `Drafter.propose`."""
        lengths_B, tokens_BS = rows.lengths_B.clamp_max(self.longest(num_tokens)), rows.tokens_BS.clone()
        draft = self._inner.propose(
            rows._replace(tokens_BS=tokens_BS, lengths_B=lengths_B), num_tokens=num_tokens, uniforms_BKP=uniforms_BKP,
            bucket=bucket, num_unread=num_unread,
        )  # fmt: skip
        rows.tokens_BS.scatter_(1, rows.lengths_B[:, None] + self._offsets_K[:num_tokens], draft.ids_BK)
        return draft

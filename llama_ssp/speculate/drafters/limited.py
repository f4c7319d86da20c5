"""A draft model whose context is shorter than its target's: longer rows go on without it.

Such a row is drafted for as if it ended within the context, so that shapes stay the same, and the verifier draws its
next token as in plain decoding, whatever was drafted. Its text depends on no other row.

    text, context of the draft 8, K = 3     | 0 1 2 3 4 5 | d d d |      the longest that is drafted for
                                            | 0 1 2 3 4 5 6 | x          goes on plainly

Tokens in flight in a round that overlaps count as text, and are dropped from a row that is too long with them.

Shapes: B sequences, S slots, K drafted tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_ssp.architectures.engine import most_drafted_for
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft


class DraftLimit(NamedTuple):
    """The context of a draft model; `depth` is the depth of its trees, None for chains."""

    context: int
    depth: int | None = None

    def longest(self, num_tokens: int) -> int:
        """The longest rows that a round of K tokens drafts for."""
        return most_drafted_for(self.context, self.depth or num_tokens)

    def of_prompts(self, prompts: Prompts) -> Prompts:
        """The beginnings of prompts, which the draft reads."""
        most = self.context
        return prompts._replace(
            lengths_R=prompts.lengths_R.clamp_max(most),
            lengths=[min(length, most) for length in prompts.lengths],
            longest=min(prompts.longest, most),
            # Truncation breaks the equality of prompts, and voids saved states.
            held=[
                held
                if length <= most
                else held._replace(num_tokens=0 if held.from_saved else min(held.num_tokens, most - 1))
                for held, length in zip(prompts.held, prompts.lengths, strict=False)
            ],
        )

    def of_rows(self, rows: Rows, num_tokens: int) -> Rows:
        """Return the rows; a row that is too long is cut, so that drafted ids fit after it."""
        lengths_B = rows.lengths_B.clamp_max(self.longest(num_tokens))
        return rows._replace(tokens_BS=rows.tokens_BS.clone(), lengths_B=lengths_B)

    def counted(self, draft: Draft, rows: Rows) -> Draft:
        """A draft of these rows, of which no token counts in rows that are too long."""
        is_served_B1 = rows.lengths_B[:, None] <= self.longest(draft.num_tokens)
        return draft.at_most(is_served_B1 * (draft.num_tokens + 1))


class LimitedDrafter:
    """Limits a drafter to the rows that fit into its model's context, which is shorter than the target's."""

    writes_ids = False  # the rows that it writes to are copies

    def __init__(self, inner: Any, limit: DraftLimit) -> None:  # noqa: ANN401 - of any class with `propose`
        self._inner, self._limit = inner, limit

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the inner drafter
        if name == "_inner":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self._inner, name)

    def longest(self, num_tokens: int) -> int:
        """The longest rows that a round of K tokens drafts for."""
        return self._limit.longest(num_tokens)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read the beginnings of prompts."""
        self._inner.prefill(self._limit.of_prompts(prompts), rows=rows, buckets=buckets)

    def propose(self, rows: Rows, *, num_tokens: int, **how: Any) -> Draft:
        """Draft for all rows; in rows that are too long no drafted token counts. See `Drafter.propose`."""
        of_rows = self._limit.of_rows(rows, num_tokens)
        return self._limit.counted(self._inner.propose(of_rows, num_tokens=num_tokens, **how), rows)

    def exchange(self, draft: Draft, rows: Rows) -> Draft:
        """See `shared.AheadDrafter`."""
        return self._limit.counted(self._inner.exchange(draft, rows), rows)

"""What a drafter is: something that extends every row of a batch by K tokens.

Whether this rank drafts at all is not decided here but in `placement`.

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, P = 2 numbers of a draw, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from llama_ssp.models.prefill import Buckets
from llama_ssp.recorded import Held
from llama_ssp.sampling.rules import Draft


class Drafter(Protocol):
    """Proposes tokens for the target to check."""

    num_draft_tokens: int

    @property
    def num_allocations(self) -> int:
        """How often `allocate` has made anew what `propose` reads, on this rank."""
        ...

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Make room for `batch_size` rows of `num_slots` tokens."""
        ...

    def prefill(
        self, tokens_RS: Tensor, lengths_R: Tensor, *, rows: Sequence[int], longest: int, buckets: Buckets
    ) -> None:
        """Take note of new prompts, as `models.prefill.read_prompts` does; the host knows which rows they become."""
        ...

    def propose(self, tokens_BS: Tensor, lengths_B: Tensor, *, uniforms_BKP: Tensor, bucket: int) -> Draft:
        """Extend every row by K tokens.

        Args:
            tokens_BS: token ids; the drafted ids are written behind each row's text.
            lengths_B: length of each row's text, at least 2.
            uniforms_BKP: random numbers in [0, 1), two for each drafted token; see `logits.draw`.
            bucket: number of cache slots to read, at least length + K.

        Returns:
            The drafted ids, the same on every rank, and the probabilities that they were drawn from.
        """
        ...

    def held(self, *, bucket: int) -> Held | None:
        """What `propose` reads and writes beside its arguments; see `Runner.held`."""
        ...

"""Prompt look-up as the drafter: what followed the last tokens where they stood before.

    text     ... a b c d e f ... a b c | d e f      the longest match ends at c, so d e f is drafted
                       ^               ^
                       end of match    L

The longest match wins, of several the latest. Where the copy would run into the end of the text, it goes on with what
it has copied: a text that repeats itself is continued in its period. A row without a match drafts its last token. The
ids are integers computed from ids that all ranks agree on, so every rank drafts by itself and no message is needed.

Shapes: B sequences, S slots, N slots read, K drafted tokens, G tokens compared.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.config.drafts.ngram import NgramConfig
from llama_ssp.drafting.protocol import DrafterParts
from llama_ssp.models.prefill import Buckets
from llama_ssp.sampling.rules import Draft

_NO_TOKEN = -1


class NgramDrafter:
    """Drafts by copying from the prompt and the text so far.

    Args:
        num_draft_tokens: K.
        longest: the most tokens that are compared, G.
        shortest: the fewest tokens that make a match.
        device: where the ids live.

    Source: Saxena 2023, "Prompt Lookup Decoding".
    """

    on_host = False
    is_point_mass = True
    repeats_operators = True
    num_allocations = 0

    def __init__(self, *, num_draft_tokens: int, longest: int, shortest: int, device: torch.device) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._longest, self._shortest = longest, shortest
        self._offsets_K = torch.arange(num_draft_tokens, device=device)
        self._last_G = torch.arange(-1, longest - 1, device=device)
        self._positions_S = torch.arange(0, device=device)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:  # noqa: ARG002 - nothing depends on the batch
        """Number the slots."""
        if num_slots > len(self._positions_S):
            self._positions_S = torch.arange(num_slots, device=self._positions_S.device)
            self.num_allocations += 1

    def prefill(
        self, tokens_RS: Tensor, lengths_R: Tensor, *, rows: Sequence[int], longest: int, buckets: Buckets
    ) -> None:
        """Do nothing: prompts are read from the batch itself."""

    def propose(self, tokens_BS: Tensor, lengths_B: Tensor, *, uniforms_BKP: Tensor, bucket: int) -> Draft:  # noqa: ARG002
        """Copy K tokens; see `Drafter.propose`."""
        lengths_B1 = lengths_B[:, None]
        period_B1 = self._period(tokens_BS[:, :bucket], lengths_B1)
        ids_BK = tokens_BS.gather(1, lengths_B1 - period_B1 + self._offsets_K % period_B1)
        tokens_BS.scatter_(1, lengths_B1 + self._offsets_K, ids_BK)
        return Draft(ids_BK, None)

    def _period(self, tokens_BN: Tensor, lengths_B1: Tensor) -> Tensor:
        """Return how far before the end of each row its best match ends (B, 1); 1 without a match."""
        positions_N = self._positions_S[: tokens_BN.shape[1]]
        padded = pad(tokens_BN, (self._longest - 1, 0), value=_NO_TOKEN)
        last_BG = padded.gather(1, lengths_B1 + self._last_G)
        equal_BNG = padded.unfold(1, self._longest, 1) == last_BG[:, None]
        # Tokens that agree, counted from the last one backwards until the first that differs.
        matched_BN = equal_BNG.flip(-1).cumprod(-1).sum(-1)
        is_match_BN = (matched_BN >= self._shortest) & (positions_N < lengths_B1 - 1)
        score_BN = (matched_BN * len(self._positions_S) + positions_N + 1) * is_match_BN
        best_B1, end_B1 = score_BN.max(1, keepdim=True)
        return torch.where(best_B1 > 0, lengths_B1 - 1 - end_B1, 1)


def make(parts: DrafterParts) -> NgramDrafter:
    """Make the drafter of a rank; see `drafting.maker`."""
    assert isinstance(parts.config, NgramConfig)
    return NgramDrafter(
        num_draft_tokens=parts.num_draft_tokens,
        longest=parts.config.longest,
        shortest=parts.config.shortest,
        device=parts.device,
    )

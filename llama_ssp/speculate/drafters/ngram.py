"""Prompt look-up as the drafter: what followed the last tokens where they stood before.

    text     ... a b c d e f ... a b c | d e f      the longest match ends at c, so d e f is drafted
                       ^               ^
                       end of match    L

The longest match wins, of several the latest. Where the copy would run into the end of the text, it goes on with what
it has copied: a text that repeats itself is continued in its period. A row without a match drafts its last token. The
ids are integers computed from ids that all ranks agree on, so every rank drafts by itself and no message is needed.

Shapes: B sequences, S slots, K drafted tokens, G tokens compared.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.settings.drafters import NgramConfig
from llama_ssp.speculate.drafters.drafter import DrafterParts
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Draft

_NO_TOKEN, _MOST_SLOTS = -1, 2**32


class NgramDrafter:
    """Drafts by copying from the prompt and the text so far.

    Args:
        longest: the most tokens that are compared, G.
        shortest: the fewest tokens that make a match.

    Source: Saxena 2023, "Prompt Lookup Decoding".
    """

    on_host = False
    repeats_operators = True
    reads_by_length = True
    num_allocations = 0

    def __init__(self, *, num_draft_tokens: int, longest: int, shortest: int, device: torch.device) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._longest, self._shortest = longest, shortest
        self._offsets_K = torch.arange(num_draft_tokens, device=device)
        self._last_G = torch.arange(-1, longest - 1, device=device)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Do nothing: there is no cache."""

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Do nothing: prompts are read from the batch itself."""

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:  # noqa: ARG002
        """Copy K tokens; see `Drafter.propose`. It reads all slots, so that one trace serves every bucket."""
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]
        offsets_K = self._offsets_K[:num_tokens]
        period_B1 = self._period(tokens_BS, lengths_B1)
        ids_BK = tokens_BS.gather(1, lengths_B1 - period_B1 + offsets_K % period_B1)
        tokens_BS.scatter_(1, lengths_B1 + offsets_K, ids_BK)
        return Draft(ids_BK, None)

    def _period(self, tokens_BS: Tensor, lengths_B1: Tensor) -> Tensor:
        """Return how far before the end of each row its best match ends (B, 1); 1 without a match."""
        padded = pad(tokens_BS, (self._longest - 1, 0), value=_NO_TOKEN)
        last_BG = padded.gather(1, lengths_B1 + self._last_G)
        equal_BSG = padded.unfold(1, self._longest, 1) == last_BG[:, None]
        # Tokens that agree, counted from the last one backwards until the first that differs.
        matched_BS = equal_BSG.flip(-1).cumprod(-1).sum(-1)
        stops_BS = torch.ones_like(tokens_BS).cumsum(1)  # one past each slot
        is_match_BS = (matched_BS >= self._shortest) & (stops_BS < lengths_B1)
        best_B1, _ = (is_match_BS * (matched_BS * _MOST_SLOTS + stops_BS)).max(1, keepdim=True)
        return torch.where(best_B1 > 0, lengths_B1 - best_B1 % _MOST_SLOTS, 1)


def make(parts: DrafterParts) -> NgramDrafter:
    """Make the drafter of a rank; see `drafters.maker`."""
    assert isinstance(parts.config, NgramConfig)
    return NgramDrafter(
        num_draft_tokens=parts.num_draft_tokens, longest=parts.config.longest, shortest=parts.config.shortest,
        device=parts.device,
    )  # fmt: skip

"""Prompt look-up as the drafter: what followed the last tokens where they stood before.

    text     ... a b c d e f ... a b c | d e f      the longest match ends at c, so d e f is drafted
                       ^               ^
                       end of match    L

The longest match wins, of several the latest. Where the copy would run into the end of the text, it goes on with what
it has copied: a text that repeats itself is continued in its period. A row without a match drafts its last token. The
ids are integers computed from ids that all ranks agree on, so every rank drafts by itself and no message is needed.

A tree copies from several matches: the children of a node are what followed the best ones, as far as that differs. The
first child goes on with the copy that its node belongs to, so a tree of one child each is the chain.

Shapes: B sequences, S slots, K drafted tokens, N those of a tree, R = B * M rows of the M nodes of a level, G tokens
compared.
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
from llama_ssp.speculate.sampling.trees import Tree

_NO_TOKEN, _MOST_SLOTS = -1, 2**32


class NgramDrafter:
    """Drafts by copying from the prompt and the text so far.

    Args:
        longest: the most tokens that are compared, G.
        shortest: the fewest tokens that make a match.
        tree: static, of the drafted tokens; None for a chain.

    Source: Saxena 2023, "Prompt Lookup Decoding".
    """

    repeats_operators = True
    reads_by_length = True
    num_allocations = 0

    def __init__(
        self, *, num_draft_tokens: int, longest: int, shortest: int, device: torch.device, tree: Tree | None = None
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._widths = tree.shape.widths if tree else ()
        self._longest, self._shortest = longest, shortest
        self._offsets_K = torch.arange(num_draft_tokens, device=device)
        self._last_G = torch.arange(longest, device=device)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Do nothing: there is no cache."""

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Do nothing: prompts are read from the batch itself."""

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:  # noqa: ARG002
        """Copy K tokens, or a tree; see `Drafter.propose`. It reads all slots, so one trace serves every bucket."""
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]
        matches_BS = self._matches(tokens_BS, lengths_B1)
        period_B1 = _period(matches_BS, lengths_B1)
        if self._widths:
            return Draft(self._draft_tree(tokens_BS, lengths_B1, matches_BS, period_B1))
        offsets_K = self._offsets_K[:num_tokens]
        ids_BK = tokens_BS.gather(1, lengths_B1 - period_B1 + offsets_K % period_B1)
        tokens_BS.scatter_(1, lengths_B1 + offsets_K, ids_BK)
        return Draft(ids_BK)

    def _draft_tree(self, tokens_RS: Tensor, lengths_R1: Tensor, matches_RS: Tensor, period_R1: Tensor) -> Tensor:
        """Return the ids (B, N) of trees from the rows and matches of their roots.

        Each node has a row of its own: its text and its path. `period_R1` is how far before the end its copy goes on.
        """
        num_rows = lengths_R1.shape[0]
        drafted: list[Tensor] = []
        for width in self._widths:
            if drafted and width > 1:
                matches_RS = self._matches(tokens_RS, lengths_R1)
            ids, periods = [tokens_RS.gather(1, lengths_R1 - period_R1)], [period_R1]
            for _ in range(width - 1):
                matches_RS = matches_RS * (tokens_RS != ids[-1])
                periods.append(_period(matches_RS, lengths_R1))
                ids.append(tokens_RS.gather(1, lengths_R1 - periods[-1]))
            drafted.append(torch.cat(ids, dim=1).view(num_rows, -1))
            tokens_RS, lengths_R1 = (part.repeat_interleave(width, dim=0) for part in (tokens_RS, lengths_R1))
            tokens_RS.scatter_(1, lengths_R1, drafted[-1].view(-1, 1))  # a copy: the batch keeps its text
            lengths_R1, period_R1 = lengths_R1 + 1, torch.cat(periods, dim=1).view(-1, 1)
        return torch.cat(drafted, dim=1)

    def _matches(self, tokens_RS: Tensor, lengths_R1: Tensor) -> Tensor:
        """Rate the match that ends before each slot (R, S): the longer, then the later the better; 0 is none."""
        padded = pad(tokens_RS, (self._longest, -1), value=_NO_TOKEN)
        last_RG = padded.gather(1, lengths_R1 + self._last_G)
        equal_RSG = padded.unfold(1, self._longest, 1) == last_RG[:, None]
        # Tokens that agree, counted from the last one backwards until the first that differs.
        matched_RS = equal_RSG.flip(-1).cumprod(-1).sum(-1)
        slots_RS = torch.ones_like(tokens_RS).cumsum(1) - 1
        is_match_RS = (matched_RS >= self._shortest) & (slots_RS < lengths_R1)
        return is_match_RS * (matched_RS * _MOST_SLOTS + slots_RS)


def _period(matches_RS: Tensor, lengths_R1: Tensor) -> Tensor:
    """Return how far before the end of each row its best match ends (R, 1); 1 without a match."""
    best_R1, _ = matches_RS.max(1, keepdim=True)
    return torch.where(best_R1 > 0, lengths_R1 - best_R1 % _MOST_SLOTS, 1)


def make(parts: DrafterParts) -> NgramDrafter:
    """Make the drafter of a rank; see `drafters.maker`."""
    assert isinstance(parts.config, NgramConfig)
    return NgramDrafter(
        num_draft_tokens=parts.num_draft_tokens, longest=parts.config.longest, shortest=parts.config.shortest,
        device=parts.device, tree=parts.tree,
    )  # fmt: skip

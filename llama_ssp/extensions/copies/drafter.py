"""Prompt look-up as the drafter: it copies the tokens that followed an earlier occurrence of the last tokens.

    text     ... a b c d e f ... a b c | d e f      the longest match ends at c, so d e f is drafted
                       ^               ^
                       end of match    L

The longest match wins; among matches of equal length, the latest does. Where the copy would run past the end of the
text, it goes on with the tokens that it has copied, so that a text that repeats itself is continued in its period. A
row without a match drafts its last token. The ids are integers computed from ids that all ranks agree on, so every rank
drafts by itself and no message is needed.

The newest other texts of the run are searched too: other samples of the prompt, and earlier completions. The drafter
copies from one of them if its match is longer than that in the text itself, and from a corpus if its match is longer
still. A table has the last occurrence of each short sequence, and for the corpus the last occurrence with the
sequence's most frequent continuation, so a round costs the same however much text there is. The drafted copies do not
change the completion: a copy is a certain proposal, and the target draws every token by the uniforms of its position.

A tree copies from several matches in its own text: the children of a node are the distinct tokens that followed the
best matches. The first child continues the copy that its node belongs to.

Shapes: B sequences, S slots, K drafted tokens, N in a tree, R = B * M rows of the M nodes of a level, G tokens
compared, H texts kept, X places of the table, W tokens added, C tokens of the corpus.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.extensions.copies.records import TABLE_BITS, NgramConfig
from llama_ssp.models.graph_inputs import Workspace
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.upload import to_device
from llama_ssp.speculate.drafters.drafter import DrafterParts, with_forced
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.trees import Tree

_NO_TOKEN, _MOST_SLOTS = -1, 2**32
_FACTOR = 0x5851F42D4C957F2D  # of a multiplicative hash modulo 2^64, below 2^63


class NgramDrafter:
    """Drafts by copying from the prompt and the text so far.

    Source: Saxena 2023, "Prompt Lookup Decoding"; from other samples: arXiv:2511.13841.
    """

    repeats_operators = True
    reads_by_length = True
    writes_ids = True

    def __init__(self, parts: DrafterParts) -> None:
        config, device = parts.config, parts.device
        assert isinstance(config, NgramConfig)
        self.num_allocations, self.num_draft_tokens = 0, parts.num_draft_tokens
        self._tree, self._num_texts = parts.tree, 0 if parts.tree else config.history
        self._sizes: Any = {"longest": config.longest, "shortest": config.shortest, "device": device}
        self._history: History | None = None
        self._corpus: Corpus | None = None
        if parts.prepared is not None and not parts.tree:
            self._corpus = Corpus(parts.prepared, num_tokens=config.num_corpus_tokens, **self._sizes)
        self._longest, self._shortest = config.longest, config.shortest
        self._offsets_K = torch.arange(parts.num_draft_tokens, device=device)
        self._last_G = torch.arange(config.longest, device=device)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Make room for other texts; the kept texts stay if the sizes are as before."""
        sizes = self._num_texts + batch_size, batch_size, num_slots
        if self._num_texts and (self._history is None or self._history.sizes != sizes):
            self._history = History(sizes, **self._sizes)
            self.num_allocations += 1

    def forget(self) -> None:
        """Forget other texts: from now on, of the texts that have begun, a row copies from its own alone."""
        if self._history:
            self._history.forget()

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Keep the prompts for other rows; each row's own is read from the batch itself."""
        if self._history:
            self._history.begin(prompts, rows)

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Copy K tokens, or a tree; see `Drafter.propose`. It reads all slots, so one trace serves every bucket."""
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]
        matches_BS = self._matches(tokens_BS, lengths_B1)
        period_B1 = _period(matches_BS, lengths_B1)
        if self._tree:
            ids_BN = self._draft_tree(
                self._tree, tokens_BS, lengths_B1, matches_BS, period_B1, forced_BK=rows.forced_BK
            )
            return Draft(ids_BN, nodes=self._tree.nodes(ids_BN.shape[0]))
        offsets_K = self._offsets_K[:num_tokens]
        ids_BK = tokens_BS.gather(1, lengths_B1 - period_B1 + offsets_K % period_B1)
        if self._history:
            num_new = self.num_draft_tokens + num_unread
            self._history.add(tokens_BS, lengths_B1, num_tokens=num_new, places_B=rows.places)
        longest_B1 = matches_BS.amax(1, keepdim=True) // _MOST_SLOTS
        for texts in [texts for texts in (self._history, self._corpus) if texts]:
            matched_B1, copied_BK = texts.find(tokens_BS, lengths_B1, offsets_K)
            ids_BK = torch.where(matched_B1 > longest_B1, copied_BK, ids_BK)
            longest_B1 = longest_B1.maximum(matched_B1)
        if rows.forced_BK.shape[1]:
            ids_BK, _ = with_forced(rows.forced_BK[:, :num_tokens], ids_BK, None, range(0))
        tokens_BS.scatter_(1, lengths_B1 + offsets_K, ids_BK)
        return Draft(ids_BK)

    def _draft_tree(
        self,
        tree: Tree,
        tokens_RS: Tensor,
        lengths_R1: Tensor,
        matches_RS: Tensor,
        period_R1: Tensor,
        *,
        forced_BK: Tensor,
    ) -> Tensor:
        """Return the ids (B, N) of trees from the rows and matches of their roots; first children may be forced.

        Each node has a row of its own, with its text and its path. `period_R1` is how far before the end of the row its
        copy continues.
        """
        num_rows = lengths_R1.shape[0]
        drafted: list[Tensor] = []
        for depth, width in enumerate(tree.shape.widths):
            if drafted and width > 1:
                matches_RS = self._matches(tokens_RS, lengths_R1)
            ids, periods = [tokens_RS.gather(1, lengths_R1 - period_R1)], [period_R1]
            for _ in range(width - 1):
                matches_RS = matches_RS * (tokens_RS != ids[-1])
                periods.append(_period(matches_RS, lengths_R1))
                ids.append(tokens_RS.gather(1, lengths_R1 - periods[-1]))
            ids_BX = torch.cat(ids, dim=1).view(num_rows, -1)
            if forced_BK.shape[1]:
                forced_B1, (copied_BW, others_BX) = forced_BK[:, depth : depth + 1], ids_BX.tensor_split([width], dim=1)
                first_B1 = copied_BW[:, :1]
                copied_BW = torch.where(copied_BW == forced_B1, first_B1, copied_BW)  # no token is a child twice
                first_B1, _ = with_forced(forced_B1, first_B1, None, range(0))
                ids_BX = torch.cat([first_B1, copied_BW[:, 1:], others_BX], dim=1)
            drafted.append(ids_BX)
            tokens_RS, lengths_R1 = (part.repeat_interleave(width, dim=0) for part in (tokens_RS, lengths_R1))
            tokens_RS.scatter_(1, lengths_R1, drafted[-1].view(-1, 1))  # a copy: the batch keeps its text
            lengths_R1, period_R1 = lengths_R1 + 1, torch.cat(periods, dim=1).view(-1, 1)
        return torch.cat(drafted, dim=1)

    def _matches(self, tokens_RS: Tensor, lengths_R1: Tensor) -> Tensor:
        """Rate the match that ends before each slot (R, S): longer ones are better, then later ones; 0 is no match."""
        padded = pad(tokens_RS, (self._longest, -1), value=_NO_TOKEN)
        last_RG = padded.gather(1, lengths_R1 + self._last_G)
        equal_RSG = padded.unfold(1, self._longest, 1) == last_RG[:, None]
        # Tokens that agree, counted from the last one backwards until the first that differs.
        matched_RS = equal_RSG.flip(-1).cumprod(-1).sum(-1)
        slots_RS = torch.ones_like(tokens_RS).cumsum(1) - 1
        is_match_RS = (matched_RS >= self._shortest) & (slots_RS < lengths_R1)
        return is_match_RS * (matched_RS * _MOST_SLOTS + slots_RS)


class _Sequences:
    """Computes sums that identify short sequences of tokens."""

    def __init__(self, *, longest: int, shortest: int, device: torch.device) -> None:
        self._longest = longest
        self._lengths_G = torch.arange(shortest, longest + 1, device=device)
        factors = [pow(_FACTOR, 2 * power + 1, 2**62) for power in range(longest)]
        self._factors_G = torch.tensor(factors, device=device)
        self._before_G = torch.arange(-1, -longest - 1, -1, device=device)

    def _before(self, tokens_RS: Tensor, slots_RW: Tensor) -> Tensor:
        """Return the G tokens before some slots of each row (R, W, G), the last one first."""
        slots_RWG = slots_RW[..., None] + self._before_G
        found_RX = tokens_RS.gather(1, slots_RWG.clamp_min(0).flatten(1))
        return found_RX.view_as(slots_RWG).masked_fill(slots_RWG < 0, _NO_TOKEN)

    def _sums(self, tokens_RWG: Tensor) -> Tensor:
        """The sums (R, W, G) of the sequences that end with the first of these tokens, shortest first."""
        return ((tokens_RWG + 1) * self._factors_G).cumsum(-1)[..., -len(self._lengths_G) :]


class Corpus(_Sequences):
    """A text of up to `num_tokens` tokens, with the last place of each sequence's most frequent continuation.

    Sequences of one length are sorted by their sums, so that a binary search finds one.
    """

    def __init__(self, ids_C: Tensor, *, num_tokens: int, longest: int, shortest: int, device: torch.device) -> None:
        super().__init__(longest=longest, shortest=shortest, device=torch.device("cpu"))
        self._tokens_C = torch.zeros(num_tokens, dtype=torch.int32)
        self._tokens_C[: len(ids_C)] = ids_C
        self._sums_GC = torch.full((len(self._lengths_G), num_tokens), 2**63 - 1)
        self._places_GC = torch.zeros(len(self._lengths_G), num_tokens, dtype=torch.int32)
        sums_CG = self._sums(self._before(ids_C[None], torch.arange(len(ids_C))[None]))[0]
        for number, length in enumerate(range(shortest, min(longest, len(ids_C) - 1) + 1)):
            places_C, sums_C = torch.arange(length, len(ids_C)), sums_CG[length:, number]
            pairs_C2 = torch.stack([sums_C, ids_C[length:]], dim=1)
            _, pair_C, counts = pairs_C2.unique(dim=0, return_inverse=True, return_counts=True)
            order_C = counts[pair_C].argsort(stable=True)
            order_C = order_C[sums_C[order_C].argsort(stable=True)]  # of equal sums the most frequent is the last
            places_C, sums_C = places_C[order_C], sums_C[order_C]
            is_last_C = torch.ones_like(sums_C, dtype=torch.bool)
            is_last_C[:-1] = sums_C[1:] != sums_C[:-1]
            found = int(is_last_C.sum())
            self._sums_GC[number, :found] = sums_C[is_last_C]
            self._places_GC[number, :found] = places_C[is_last_C]
        for name, value in vars(self).items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)

    def find(self, tokens_BS: Tensor, lengths_B1: Tensor, offsets_K: Tensor) -> tuple[Tensor, Tensor]:
        """See `History.find`."""
        sums_GB = self._sums(self._before(tokens_BS, lengths_B1))[:, 0].t().contiguous()
        at_GB = torch.searchsorted(self._sums_GC, sums_GB).clamp_max(len(self._tokens_C) - 1)
        is_match_GB = (self._sums_GC.gather(1, at_GB) == sums_GB) & (self._lengths_G[:, None] <= lengths_B1.t())
        matched_1B, best_1B = (is_match_GB * self._lengths_G[:, None]).max(0, keepdim=True)
        places_B1 = self._places_GC.gather(1, at_GB).gather(0, best_1B).t()
        copied_BK = self._tokens_C[(places_B1 + offsets_K).clamp_max(len(self._tokens_C) - 1)]
        return matched_1B.t(), copied_BK.long()


class History(_Sequences, Workspace):
    """The newest texts of a run, and a table of the last occurrence of each sequence of tokens in them.

    Texts have serial numbers from 1; text n is in row n % H. Texts up to number `_dropped_11` are no longer kept and
    share one extra row. An entry of the table is n * S + slot of the token that followed a sequence, 0 if none did;
    sequences that share an entry are distinguished by their tokens.

    Args:
        sizes: H, B and S.
        longest: number of tokens of the longest sequences.
        shortest: number of tokens of the shortest sequences.
    """

    def __init__(self, sizes: tuple[int, int, int], *, longest: int, shortest: int, device: torch.device) -> None:
        super().__init__(longest=longest, shortest=shortest, device=device)
        self.sizes, self._num_serials = sizes, 0
        num_texts, batch_size, num_slots = sizes
        self._tokens_HS = torch.zeros(num_texts + 1, num_slots, dtype=torch.int64, device=device)
        self._latest_X = self._tokens_HS.new_zeros(len(self._lengths_G) << TABLE_BITS)
        self._firsts_G = torch.arange(len(self._lengths_G), device=device) << TABLE_BITS
        self._serials_B1, self._dropped_11 = self._tokens_HS.new_zeros(batch_size, 1), self._tokens_HS.new_zeros(1, 1)

    def forget(self) -> None:
        """Forget all texts so far."""
        self._num_serials = 0
        for numbers in (self._latest_X, self._serials_B1, self._dropped_11):
            numbers.zero_()

    def begin(self, prompts: Prompts, rows: Sequence[int]) -> None:
        """Let new texts begin in these rows of the batch, with their prompts."""
        numbers = range(self._num_serials + 1, self._num_serials + 1 + len(rows))
        self._num_serials += len(rows)
        device = self._tokens_HS.device
        serials_R1 = to_device(numbers, device)[:, None]
        self._serials_B1.index_copy_(0, to_device(rows, device), serials_R1)
        self._dropped_11.fill_(max(self._num_serials - self.sizes[0], 0))
        slots_1W = torch.arange(prompts.longest, device=device)[None]
        self._add(prompts.tokens_RS, torch.minimum(slots_1W, prompts.lengths_R[:, None] - 1), serials_R1)

    def add(self, tokens_BS: Tensor, lengths_B1: Tensor, *, num_tokens: int, places_B: Tensor | None = None) -> None:
        """Add the newest `num_tokens` tokens of each row of the batch, or only of rows `places_B`."""
        steps_W = torch.arange(-num_tokens, 0, device=lengths_B1.device)
        serials_B1 = self._serials_B1 if places_B is None else self._serials_B1.index_select(0, places_B)
        self._add(tokens_BS, (lengths_B1 + steps_W).clamp_min(0), serials_B1)

    def _add(self, tokens_RS: Tensor, slots_RW: Tensor, serials_R1: Tensor) -> None:
        num_texts, _, num_slots = self.sizes
        is_kept_R1 = serials_R1 > self._dropped_11
        # Two rows must not write one cell: GPUs keep either value, and ranks would draft different tokens.
        at_RW = torch.where(is_kept_R1, serials_R1 % num_texts, num_texts) * num_slots + slots_RW
        self._tokens_HS.view(-1).scatter_(0, at_RW.flatten(), tokens_RS.gather(1, slots_RW).flatten())
        keys_RWG = self._keys(self._before(tokens_RS, slots_RW))
        follows_RWG = is_kept_R1[..., None] & (slots_RW[..., None] >= self._lengths_G)
        values_RWG = (serials_R1 * num_slots + slots_RW)[..., None] * follows_RWG
        self._latest_X.scatter_reduce_(0, keys_RWG.flatten(), values_RWG.flatten(), "amax")

    def find(self, tokens_BS: Tensor, lengths_B1: Tensor, offsets_K: Tensor) -> tuple[Tensor, Tensor]:
        """Find the longest match of each row's end; returns its length (B, 1), 0 for none, and K tokens after it."""
        num_texts, _, num_slots = self.sizes
        last_B1G = self._before(tokens_BS, lengths_B1)
        values_BG = self._latest_X[self._keys(last_B1G)[:, 0]]
        serials_BG, slots_BG = values_BG // num_slots, values_BG % num_slots
        firsts_BG = serials_BG % num_texts * num_slots
        slots_BGG = slots_BG[..., None] + self._before_G
        found_BGG = self._tokens_HS.view(-1)[firsts_BG[..., None] + slots_BGG.clamp_min(0)]
        equal_BGG = (found_BGG == last_B1G) & (slots_BGG >= 0)
        matched_BG = equal_BGG.cumprod(-1).sum(-1)
        is_match_BG = (serials_BG > self._dropped_11) & (matched_BG >= self._lengths_G)
        matched_B1, best_B1 = (is_match_BG * self._lengths_G).max(1, keepdim=True)
        slots_BK = (slots_BG.gather(1, best_B1) + offsets_K).clamp_max(num_slots - 1)
        return matched_B1, self._tokens_HS.view(-1)[firsts_BG.gather(1, best_B1) + slots_BK]

    def _keys(self, tokens_RWG: Tensor) -> Tensor:
        """Return the indices (R, W, G) of sequences in the table; see `_sums`."""
        sums_RWG = self._sums(tokens_RWG)
        return ((sums_RWG >> 20) ^ sums_RWG).bitwise_and_((1 << TABLE_BITS) - 1) + self._firsts_G


def _period(matches_RS: Tensor, lengths_R1: Tensor) -> Tensor:
    """Return how far before the end of each row its best match ends (R, 1); 1 without a match."""
    best_R1, _ = matches_RS.max(1, keepdim=True)
    return torch.where(best_R1 > 0, lengths_R1 - best_R1 % _MOST_SLOTS, 1)

"""A head of several modules as the drafter: each drafts one token, from the pairs that it reads in every round.

    a round, K = 3, three modules, pairs in slots of each one's cache    L-5   L-4   L-3   L-2
      module 0: the tokens after the pairs                               L-4   L-3   L-2   L-1
      module 1: the tokens two further                                   L-3   L-2   L-1    d1
      module 2: three further                                            L-2   L-1    d1    d2

Each module always reads the K + 1 pairs that may be new. These include all pairs that it has read with rejected tokens,
since no more modules run than tokens are drafted.

Shapes: B sequences, S slots, K drafted tokens, T pairs, E width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.extensions.heads.drafter import HeadDrafter
from llama_ssp.extensions.heads.protocol import ModulesHead
from llama_ssp.models.prefill import Prompts
from llama_ssp.models.upload import to_device
from llama_ssp.speculate.drafters.drafter import DrafterParts
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.trees import Level, ReadLevel


class ModulesDrafter(HeadDrafter):
    """Drafts with several modules; see `HeadDrafter`."""

    _head: ModulesHead

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        self._num_modules = min(self._head.num_modules, parts.num_draft_tokens)
        self._modules = range(self._num_modules)

    def _reading_pairs(self, prompts: Prompts, rows: Sequence[int]) -> Callable[..., Tensor]:
        """See `HeadDrafter`; pairs whose tokens are not drawn yet are read again in the first round."""
        rows_P = to_device(rows, self._head.device)

        def read(_ids_RT: Tensor, positions_RT: Tensor, *, cache_rows_B: Tensor, **where: Any) -> Tensor:
            places_R = (cache_rows_B[:, None] == rows_P).long().argmax(1)
            tokens_RS = prompts.tokens_RS.index_select(0, places_R)
            lengths_R1 = prompts.lengths_R.index_select(0, places_R)[:, None]
            rows_R = self._rows.rows_B.index_select(0, cache_rows_B)
            return self._read_all(tokens_RS, lengths_R1, positions_RT, rows_R, cache_rows_B=cache_rows_B, **where)

        return read

    def _read_all(
        self,
        tokens_BS: Tensor,
        lengths_B1: Tensor,
        positions_BT: Tensor,
        rows_B: Tensor,
        *,
        score_positions_B1: Tensor,
        **where: Any,
    ) -> Tensor:
        """Read pairs of texts with all modules; returns the last one's logits of the scored pairs."""
        hidden_BTE = self._hidden(positions_BT, rows_B)
        for module in self._modules:
            found_BTE, logits_B1V = self._head.extend(
                _tokens(tokens_BS, positions_BT + 1 + module, lengths_B1 - 1),
                hidden_BTE,
                positions_BT,
                score_positions_B1=score_positions_B1,
                module=module,
                keeps_all=True,
                **where,
            )
            hidden_BTE = found_BTE if self._head.chains else hidden_BTE
        return logits_B1V

    def _catch_up(self, rows: Rows, *, bucket: int, num_unread: int) -> None:
        lengths_B1 = rows.lengths_B[:, None]
        for positions_BT, how in self._missed(rows, num_unread=num_unread):
            self._read_all(
                rows.tokens_BS,
                lengths_B1,
                positions_BT,
                self._in_taps(rows),
                bucket=bucket,
                score_positions_B1=torch.zeros_like(lengths_B1),
                cache_rows_B=rows.places,
                **how,
            )

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """See `Drafter.propose`; all modules read the text; a shorter draft is the beginning of one by all modules."""
        more = max(len(self._modules) - num_tokens, 0)
        if more:
            uniforms_BKP = pad(uniforms_BKP[:, :num_tokens], (0, 0, 0, more))
            forced_BK = rows.forced_BK
            rows = rows._replace(
                forced_BK=pad(forced_BK[:, :num_tokens], (0, more), value=-1) if forced_BK.shape[1] else forced_BK
            )
        draft = super().propose(
            rows, num_tokens=num_tokens + more, uniforms_BKP=uniforms_BKP, bucket=bucket, num_unread=num_unread
        )
        return draft.first(num_tokens) if more else draft

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> ReadLevel:
        """Return the reader of levels; after the last module, the next pair has that module's own output."""
        tokens_BS, lengths_B1, last = rows.tokens_BS, rows.lengths_B[:, None], self._modules[-1]
        self._catch_up(rows, bucket=bucket, num_unread=num_unread)
        start_B1 = (lengths_B1 - 1 - self._width).clamp_min(0)
        positions_BT, newest_B1 = start_B1 + self._pairs_T[: self._width], lengths_B1 - 2
        hidden_BTE = self._hidden(positions_BT, self._in_taps(rows))
        own_B1E = hidden_BTE[:, :1]

        def logits_of(level: Level | None) -> Tensor:
            nonlocal hidden_BTE, own_B1E
            depth, ids_B1 = (level.depth, level.ids_BM) if level else (0, lengths_B1)
            if level:
                tokens_BS.scatter_(1, lengths_B1 + depth - 1, ids_B1)
            if depth > last:
                own_B1E, logits_B1V = self._head.extend(
                    ids_B1, own_B1E, newest_B1 + depth - last, bucket=bucket, cache_rows_B=rows.places, module=last
                )
                return logits_B1V
            scored_B1 = newest_B1 - start_B1
            found_BTE, logits_B1V = self._head.extend(
                _tokens(tokens_BS, positions_BT + 1 + depth, lengths_B1 - 1 + depth),
                hidden_BTE,
                positions_BT,
                bucket=bucket,
                score_positions_B1=scored_B1,
                cache_rows_B=rows.places,
                module=depth,
                keeps_all=True,
            )
            own_B1E = found_BTE.gather(1, scored_B1[..., None].expand(-1, -1, found_BTE.shape[-1]))
            hidden_BTE = found_BTE if self._head.chains else hidden_BTE
            return logits_B1V

        return logits_of


def _tokens(tokens_BS: Tensor, places_BT: Tensor, last_B1: Tensor) -> Tensor:
    """The tokens at some places of the texts, no later than `last_B1`."""
    return tokens_BS.gather(1, places_BT.minimum(last_B1))

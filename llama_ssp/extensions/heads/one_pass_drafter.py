"""A draft head of one pass as the drafter: every round is one forward of it, however many tokens it drafts.

    a round, K = 3, positions of the head's cache    L-2-K ...... L-2   L-1    L    L+1   L+2
      context: positions that may be new, of taps       g ......... g
      P-EAGLE: pairs, with the token after each         t ......... t   mask  mask
      DFlash: the newest token and masks                                 t    mask  mask  mask

Each position of the block has the law of one drafted token, given the text; with a Markov head, given the token drafted
before it as well. Each is drawn by uniforms of its own, as the rule draws. With `draft.confidence` a draft ends before
the first token whose acceptance the head estimates to be lower; the estimate reads the token before.

Shapes: B sequences, C = K + 1 positions of the context, T of the forward, K drafted tokens, M nodes of a level, V
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.extensions.heads.drafter import HeadDrafter
from llama_ssp.extensions.heads.protocol import Confident, Following, OnePassHead
from llama_ssp.extensions.heads.records import least_confidence
from llama_ssp.speculate.drafters.drafter import DrafterParts
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.trees import Level, ReadLevel

_ALL_COUNT = 2**31


@dataclass(frozen=True)
class _Block:
    """The logits of a block, level by level; a `ReadLevel`."""

    following: Following
    newest_B1: Tensor

    def __call__(self, level: Level | None) -> Tensor:
        depth, ids_BM, _, parents_BM, _ = level or Level(0, self.newest_B1)
        return self.following(depth, ids_BM, parents_BM)


class OnePassDrafter(HeadDrafter):
    """Drafts with a head of one pass; see `HeadDrafter`."""

    _head: OnePassHead

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        self._block_T = torch.arange(self._head.block_size(self._width - 1), device=parts.device)
        self._least_confidence = least_confidence(parts.config)

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> ReadLevel:
        tokens_BS, newest_B1 = rows.tokens_BS, rows.lengths_B[:, None] - 1
        self._catch_up(rows, bucket=bucket, num_unread=num_unread)
        context_BC = (newest_B1 - self._width + self._pairs_T[: self._width]).clamp_min(0)
        positions_BT = torch.cat([context_BC, newest_B1 + self._block_T], dim=1)
        places_BT = positions_BT + self._head.tokens_ahead
        ids_BT = tokens_BS.gather(1, places_BT.minimum(newest_B1))
        following = self._head.draft(
            ids_BT.masked_fill(places_BT > newest_B1, self._head.mask_token_id),
            self._hidden(context_BC, self._in_taps(rows)),
            positions_BT,
            num_drafted=self._width - 1,
            bucket=bucket,
            cache_rows_B=rows.places,
        )
        return _Block(following, tokens_BS.gather(1, newest_B1))

    def _num_counted(self, read: ReadLevel, ids_BK: Tensor) -> Tensor | tuple[()]:
        if not self._least_confidence:
            return ()
        assert isinstance(read, _Block)
        assert isinstance(read.following, Confident), "else refused by `records`"
        logits_BK = read.following.confidence(torch.cat([read.newest_B1, ids_BK[:, :-1]], dim=1))
        num_B1 = (logits_BK.float().sigmoid() >= self._least_confidence).cumprod(1).sum(1, keepdim=True)
        return num_B1.masked_fill(num_B1 == ids_BK.shape[1], _ALL_COUNT)

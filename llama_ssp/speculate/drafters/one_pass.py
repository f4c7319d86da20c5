"""A draft head of one pass as the drafter: every round is one forward of it, however many tokens it drafts.

    a round, K = 3, positions of the head's cache    L-2-K ...... L-2   L-1    L    L+1   L+2
      context: those that may be new, of taps           g ......... g
      P-EAGLE: pairs, with the token behind each        t ......... t   mask  mask
      DFlash: the newest token and masks                                 t    mask  mask  mask

Each position of the block has the law of one drafted token, given the text; with a Markov head, given the token drafted
before it as well. Each is drawn by uniforms of its own, as the rule draws.

Shapes: B sequences, C = K + 1 positions of the context, T of the forward, M nodes of a level, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llama_ssp.models.runner import Following, OnePassHead
from llama_ssp.speculate.drafters.head import HeadDrafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.trees import Level


class OnePassDrafter(HeadDrafter):
    """Drafts with a head of one pass; see `HeadDrafter`."""

    _head: OnePassHead

    def __init__(self, head: OnePassHead, *of_head: Any, **parts: Any) -> None:  # noqa: ANN401 - see `HeadDrafter`
        super().__init__(head, *of_head, **parts)
        self._block_T = torch.arange(head.block_size(self._width - 1), device=head.device)

    def _draft(self, rows: Rows, *, bucket: int, num_unread: int) -> tuple[Tensor, Following]:
        """The newest token (B, 1) of each row, and the logits behind it and behind those that will be drafted."""
        tokens_BS, newest_B1 = rows.tokens_BS, rows.lengths_B[:, None] - 1
        self._catch_up(rows, bucket=bucket, num_unread=num_unread)
        context_BC = (newest_B1 - self._width + self._pairs_T[: self._width]).clamp_min(0)
        positions_BT = torch.cat([context_BC, newest_B1 + self._block_T], dim=1)
        places_BT = positions_BT + self._head.tokens_ahead
        ids_BT = tokens_BS.gather(1, places_BT.minimum(newest_B1))
        following = self._head.draft(
            ids_BT.masked_fill(places_BT > newest_B1, self._head.mask_token_id),
            self._hidden(context_BC, self._tables.rows_B), positions_BT, num_drafted=self._width - 1, bucket=bucket,
        )  # fmt: skip
        return tokens_BS.gather(1, newest_B1), following

    def _reading_levels(self, rows: Rows, *, bucket: int, num_unread: int) -> Callable[..., Tensor]:
        newest_B1, following = self._draft(rows, bucket=bucket, num_unread=num_unread)

        def logits_of(level: Level | None) -> Tensor:
            return following(level.depth, level.ids_BM, level.parents_BM) if level else following(0, newest_B1, None)

        return logits_of

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> Callable[[int, Tensor | None], Tensor]:
        newest_B1, following = self._draft(rows, bucket=bucket, num_unread=num_unread)

        def logits_of(step: int, before_B1: Tensor | None) -> Tensor:
            return following(step, newest_B1 if before_B1 is None else before_B1, None)[:, 0]

        return logits_of

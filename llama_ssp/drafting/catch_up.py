"""Reads the tokens that a draft model skipped in rounds that it did not draft.

Shapes: B sequences, S slots, T tokens of a chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llama_ssp.architectures.sizes import CATCH_UP_CHUNK
from llama_ssp.models.runner import Runner


class CatchUp:
    """Reads the end of each row into a model's cache, in chunks."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._offsets_T = torch.arange(CATCH_UP_CHUNK, device=runner.device)

    def read(
        self,
        tokens_BS: Tensor,
        lengths_B1: Tensor,
        *,
        num_unread: int,
        num_kept: int,
        bucket: int,
        known: Callable[[Tensor], Tensor],
    ) -> None:
        """Read the last `num_unread` tokens of each row but for the last `num_kept`, which the caller reads.

        A row with fewer tokens reads its first one several times. `known` makes ids of the model from tokens.
        """
        for distance in range(num_unread, num_kept, -CATCH_UP_CHUNK):
            positions_BT = (lengths_B1 - distance + self._offsets_T).clamp_min(0)
            ids_BT, first_B1 = known(tokens_BS.gather(1, positions_BT)), torch.zeros_like(lengths_B1)
            self._runner.forward(ids_BT, positions_BT, bucket=bucket, score_positions_BR=first_B1, consecutive=False)

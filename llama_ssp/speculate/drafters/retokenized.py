"""A draft model with its own tokenizer, whose text the target's tokenizer encodes: one step on the host per round.

    target's ids  ->  text  ->  draft's ids   | new ones are read; the cache keeps what the last round has in common
    draft's ids   ->  K greedy steps  ->  text that follows  ->  target's ids, of which K are proposed

Nothing is taken from the draft but ids, so each is certain (a point mass): a rule accepts it as often as the target
would have chosen it, and under `coupled` exactly when it does. Where tokens merge as the text grows, the draft's ids
change from some place on, and the cache is rolled back to that place.

Shapes: B sequences, R rows that are read, K drafted tokens, T positions of a forward, D the draft's vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ssp.models.prefill import Buckets, Prompts, num_common
from llama_ssp.models.runner import Runner
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.layout import PREFILL_CHUNK, own_slots
from llama_ssp.speculate.drafters.drafter import HostTimed
from llama_ssp.speculate.drafters.tokenizers import TokenizerPair
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Draft

_WINDOW = 64
"""The fewest tokens at the end of a text that a round encodes; it encodes fewer than twice as many."""
_CUT = 4
"""A text that is too long loses its beginning, a quarter of the cache at a time: then all that is left is read."""


class RetokenizedDrafter(HostTimed):
    """Drafts with a model that has another tokenizer, by text.

    Args:
        tokenizers: the target's and the draft's.
        comm: the ranks that share the draft; None for one rank.

    Source: Timor et al. 2025, arXiv:2502.05202, Algorithm 2 (string-level exact match).
    """

    on_host = True
    repeats_operators = False

    def __init__(
        self, runner: Runner, *, num_draft_tokens: int, tokenizers: TokenizerPair, comm: Comm | None = None
    ) -> None:
        self.runner, self.num_draft_tokens, self.tokenizers = runner, num_draft_tokens, tokenizers
        self.reads_by_length = runner.reads_by_length
        self._comm = comm or Comm.single()
        self._cached: list[list[int]] = []

    @property
    def num_allocations(self) -> int:
        """See `Drafter`."""
        return self.runner.num_allocations

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate the cache, and forget what it held."""
        self._num_slots = own_slots(num_slots, max_position_embeddings=self.runner.max_position_embeddings)
        self.runner.allocate(batch_size=batch_size, capacity=self._num_slots)
        self._buckets = Buckets(step=self._num_slots, num_slots=self._num_slots)  # until prompts come: warm rounds read
        self._cached = [[] for _ in range(batch_size)]
        self._kept = [(0, list[int]()) for _ in range(batch_size)]

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts in the draft's own tokens."""
        self._buckets = Buckets(step=buckets.step, num_slots=self._num_slots)
        texts = zip(rows, self._comm.read(prompts.tokens_RS).tolist(), prompts.lengths, strict=True)
        for row in rows:
            self._kept[row] = 0, []
        self._read({row: self._own_ids(row, ids[:length]) for row, ids, length in texts})

    def propose(
        self,
        rows: Rows,
        *,
        num_tokens: int,
        uniforms_BKP: Tensor,  # noqa: ARG002 - it draws nothing
        bucket: int,  # noqa: ARG002 - its own is known
        num_unread: int = 2,  # noqa: ARG002 - so is this
    ) -> Draft:
        """Continue the text of every row by up to K tokens of the draft; see `Drafter.propose`."""
        texts = [
            ids[:length]
            for ids, length in zip(
                self._comm.read(rows.tokens_BS).tolist(), self._comm.read(rows.lengths_B).tolist(), strict=True
            )
        ]
        with self.timing_host():
            own = [self._own_ids(row, ids) for row, ids in enumerate(texts)]
        found = self._continued(own, num_steps=num_tokens)
        proposed = []
        with self.timing_host():
            for ids, before, after in zip(texts, own, found, strict=True):
                new_ids = self.tokenizers.into_target(ids, before, after)[:num_tokens]
                proposed.append(new_ids + [ids[-1]] * (num_tokens - len(new_ids)))
        ids_BK = to_device(proposed, rows.tokens_BS.device)
        offsets_K = torch.arange(num_tokens, device=ids_BK.device)
        rows.tokens_BS.scatter_(1, rows.lengths_B[:, None] + offsets_K, ids_BK)
        return Draft(ids_BK, None)

    def _own_ids(self, row: int, ids: list[int]) -> list[int]:
        """A row's text in the draft's tokens, without its beginning if it is too long.

        The ids of all but the last tokens are kept from time to time, so that a round encodes a bounded text.
        """
        num_kept, kept = self._kept[row]
        if num_kept > len(ids):  # a vacated row
            num_kept, kept = 0, []
        if len(ids) - num_kept >= 2 * _WINDOW:
            kept = kept + self._own_ids_from(ids[:-_WINDOW], num_kept)
            num_kept = len(ids) - _WINDOW
            self._kept[row] = num_kept, kept
        own = kept + self._own_ids_from(ids, num_kept)
        excess = len(own) - (self._num_slots - self.num_draft_tokens - 1)
        step = max(self._num_slots // _CUT, 1)
        return own[-(-excess // step) * step :] if excess > 0 else own

    def _own_ids_from(self, ids: list[int], start: int) -> list[int]:
        return self.tokenizers.into_draft(ids, start=start, size=self.runner.vocab_size)

    def _continued(self, own: Sequence[list[int]], *, num_steps: int) -> list[list[int]]:
        """The tokens that the draft takes to be the most probable after each row's.

        Ranks that share the draft find the same ones, since all have the same gathered logits, and the first of the
        largest is the same token on every device.
        """
        logits_BD = self._read(dict(enumerate(own)))
        taken: list[Tensor] = []
        starts_B1 = to_device([[len(ids)] for ids in own], self.runner.device)
        bucket = self._buckets.covering(max(map(len, own)) + num_steps)
        for step in range(num_steps):
            if step:
                logits_BD = self.runner.forward(taken[-1], starts_B1 + (step - 1), bucket=bucket)[:, 0]
            taken.append(logits_BD.argmax(-1, keepdim=True))
        found: list[list[int]] = self._comm.read(torch.cat(taken, dim=1)).tolist()
        self._cached = [[*ids, *new_ids[:-1]] for ids, new_ids in zip(own, found, strict=True)]
        return found

    def _read(self, texts: dict[int, list[int]]) -> Tensor:
        """Make the cache hold the texts of some rows; returns the logits (R, D) after each.

        At least the last token is read. Rows with fewer new tokens than others repeat their last one in place.
        """
        starts = {row: min(num_common(self._cached[row], ids), len(ids) - 1) for row, ids in texts.items()}
        width = max(len(ids) - starts[row] for row, ids in texts.items())
        texts_RX = pad_sequence([torch.tensor(ids) for ids in texts.values()], batch_first=True)
        positions_RT = torch.tensor(
            [[min(starts[row] + place, len(ids) - 1) for place in range(width)] for row, ids in texts.items()]
        )
        device, bucket = self.runner.device, self._buckets.covering(texts_RX.shape[1])
        rows_R = None if [*texts] == [*range(len(self._cached))] else to_device([*texts], device)
        ids_RT, positions_RT = to_device(texts_RX.gather(1, positions_RT), device), to_device(positions_RT, device)
        logits_RD: Tensor | None = None
        for start in range(0, width, PREFILL_CHUNK):
            chunk_RT = positions_RT[:, start : start + PREFILL_CHUNK]
            last_R1 = torch.full_like(chunk_RT[:, :1], chunk_RT.shape[1] - 1)
            logits_RD = self.runner.forward(
                ids_RT[:, start : start + PREFILL_CHUNK], chunk_RT, bucket=bucket, score_positions_BR=last_R1,
                cache_rows_B=rows_R, consecutive=False,
            )[:, 0]  # fmt: skip
        assert logits_RD is not None, "a text has at least one token"
        for row, ids in texts.items():
            self._cached[row] = ids
        return logits_RD

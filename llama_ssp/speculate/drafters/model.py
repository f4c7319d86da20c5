"""A smaller model as the drafter.

Shapes: B sequences, S slots, K drafted tokens, P = 2 uniforms per draw, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import Runner, TreePlaces
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Reads
from llama_ssp.registry import imported
from llama_ssp.settings.drafters import cache_of, vocabulary_of
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts, StepwiseDrafter, catch_up, take_in
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.trees import Level, ReadLevel

_NUM_READ = 2
"""Tokens that the first step of a round reads."""


class ModelDrafter(StepwiseDrafter):
    """Drafts with a model, under the same processors as the target; its logits are cut or padded to the target's.

    The first step of a round always reads the last two tokens, rewriting one cache slot: after a fully accepted round
    the cache lacks the last drafted token, and reading two keeps the shape the same whatever was accepted.
    """

    runner: Runner

    def __init__(self, parts: DrafterParts) -> None:
        assert parts.runner
        super().__init__(parts.runner, parts)
        self._last_two = torch.arange(-_NUM_READ, 0, device=parts.runner.device)
        if parts.tree:
            self._depth, self._path_T = parts.tree.depth, torch.arange(parts.tree.depth + 1, device=parts.device)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts into the draft's own cache."""
        known = prompts._replace(tokens_RS=self._known(prompts.tokens_RS))
        read_prompts(self.runner, known, rows=rows, buckets=buckets, num_left=1)
        if self.runner.is_recurrent:
            self._tables.unread_B.index_copy_(0, to_device(rows, self.runner.device), prompts.lengths_R - 1)

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> ReadLevel:
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]
        unread_B, is_recurrent = self._tables.unread_B, self.runner.is_recurrent
        if num_unread > _NUM_READ:
            known_BS = self._known(tokens_BS)
            if is_recurrent:
                take_in(self.runner, known_BS, lengths_B1, unread_B=unread_B, num_unread=num_unread, bucket=bucket)
            else:
                catch_up(
                    self.runner,
                    known_BS,
                    lengths_B1,
                    num_unread=num_unread,
                    num_kept=_NUM_READ,
                    bucket=bucket,
                    cache_rows_B=rows.places,
                )
        if is_recurrent:  # the first step takes in the last two
            unread_B.copy_(rows.lengths_B)

        def logits_of(level: Level | None) -> Tensor:
            wanted_B1: Tensor | None = None
            places: TreePlaces | None = None
            if level:
                ids_BM = level.ids_BM
                positions_BM, places = self._places(level, lengths_B1, before=1, bucket=bucket)
            elif self._tree:  # all that a path may have added, since accepted nodes stand elsewhere in the cache
                start_B1 = (lengths_B1 - 1 - self._depth).clamp_min(0)
                positions_BM, wanted_B1 = start_B1 + self._path_T, lengths_B1 - 1 - start_B1
                ids_BM = tokens_BS.gather(1, positions_BM)
            else:
                positions_BM, wanted_B1 = lengths_B1 + self._last_two, self._tables.second_B1[: len(lengths_B1)]
                ids_BM = tokens_BS.gather(1, positions_BM)
            logits_BMV = self.runner.forward(
                self._known(ids_BM),
                positions_BM,
                bucket=bucket,
                score_positions_BR=wanted_B1,
                cache_rows_B=rows.places,
                tree=places,
            )
            missing = self.vocab_size - logits_BMV.shape[-1]
            if self._rule.reads is not Reads.all or not missing:
                return logits_BMV
            return pad(logits_BMV, (0, missing), value=float("-inf"))

        return logits_of

    def _known(self, ids: Tensor) -> Tensor:
        """Replace ids that only the target's larger vocabulary has by the draft's last id; any draft is valid."""
        is_narrower = self.runner.vocab_size < self.vocab_size
        return ids.clamp(max=self.runner.vocab_size - 1) if is_narrower else ids


def make(parts: DrafterParts) -> Drafter:
    """Make the drafter on a rank that holds the draft model or a slice of it; see `drafters.maker`."""
    kept, make_drafter = cache_of(parts.config), None
    if parts.taps is not None:  # which only a head reads
        make_drafter = parts.runner.make_drafter
        if kept:
            parts = replace(parts, runner=imported(kept.of_head, setting="draft")(parts.runner, parts))
    how = kept or vocabulary_of(parts.config)
    drafter: Drafter = (make_drafter or imported(how.make, setting="draft"))(parts)
    return drafter

"""A smaller model as the drafter.

Shapes: B sequences, S slots, K drafted tokens, P = 2 uniforms per draw, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Reads
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts, StepwiseDrafter, catch_up, take_in
from llama_ssp.speculate.drafters.head import HeadDrafter
from llama_ssp.speculate.drafters.intersection import IntersectionDrafter, VocabularyMap
from llama_ssp.speculate.drafters.one_pass import OnePassDrafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Rule
from llama_ssp.speculate.sampling.trees import Level, Tree

_NUM_READ = 2
"""Tokens that the first step of a round reads."""


class ModelDrafter(StepwiseDrafter):
    """Drafts with a model, under the same processors as the target; its logits are cut or padded to the target's.

    The first step of a round always reads the last two tokens, rewriting one cache slot: after a fully accepted round
    the cache lacks the last drafted token, and reading two keeps the shape the same whatever was accepted.
    """

    runner: Runner

    def __init__(
        self, runner: Runner, *, rule: Rule, num_draft_tokens: int, vocab_size: int, tree: Tree | None = None,
        num_ahead: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            runner, rule=rule, num_draft_tokens=num_draft_tokens, vocab_size=vocab_size, tree=tree, num_ahead=num_ahead
        )
        self._last_two = torch.arange(-_NUM_READ, 0, device=runner.device)
        if tree:
            self._depth, self._path_T = tree.depth, torch.arange(tree.depth + 1, device=runner.device)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts into the draft's own cache."""
        known = prompts._replace(tokens_RS=self._known(prompts.tokens_RS))
        read_prompts(self.runner, known, rows=rows, buckets=buckets, num_left=1)
        if self.runner.keeps_states:
            self._tables.unread_B.index_copy_(0, to_device(rows, self.runner.device), prompts.lengths_R - 1)

    def _reading(self, rows: Rows, *, bucket: int, num_unread: int) -> Callable[[int, Tensor | None], Tensor]:
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]
        unread_B, keeps_states = self._tables.unread_B, self.runner.keeps_states
        if num_unread > _NUM_READ:
            known_BS = self._known(tokens_BS)
            if keeps_states:
                take_in(self.runner, known_BS, lengths_B1, unread_B=unread_B, num_unread=num_unread, bucket=bucket)
            else:
                catch_up(self.runner, known_BS, lengths_B1, num_unread=num_unread, num_kept=_NUM_READ, bucket=bucket)
        if keeps_states:  # the first step takes in the last two
            unread_B.copy_(rows.lengths_B)

        def logits_of(step: int, before_B1: Tensor | None) -> Tensor:
            if before_B1 is None:
                positions_BT, wanted_B1 = lengths_B1 + self._last_two, self._tables.second_B1
                ids_BT = tokens_BS.gather(1, positions_BT)
            else:
                positions_BT, wanted_B1, ids_BT = lengths_B1 + (step - 1), None, before_B1
            logits_BV = self.runner.forward(
                self._known(ids_BT), positions_BT, bucket=bucket, score_positions_BR=wanted_B1
            )[:, 0]
            return self._widened(logits_BV)

        return logits_of

    def _reading_levels(self, rows: Rows, *, bucket: int, num_unread: int) -> Callable[..., Tensor]:
        """The first forward reads what a path may have added, since accepted nodes stand elsewhere in the cache."""
        assert num_unread == _NUM_READ, "every round drafts"
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]

        def logits_of(level: Level | None) -> Tensor:
            if level is None:
                start_B1 = (lengths_B1 - 1 - self._depth).clamp_min(0)
                positions_BT = start_B1 + self._path_T
                logits_BMV = self.runner.forward(
                    self._known(tokens_BS.gather(1, positions_BT)), positions_BT, bucket=bucket,
                    score_positions_BR=lengths_B1 - 1 - start_B1,
                )  # fmt: skip
            else:
                positions_BM, places = self._tree_tables.places(
                    lengths_B1 - 1, level.first, level.depth, level.sees_BMA, bucket=bucket
                )
                logits_BMV = self.runner.forward(self._known(level.ids_BM), positions_BM, bucket=bucket, tree=places)
            return self._widened(logits_BMV)

        return logits_of

    def _widened(self, logits: Tensor) -> Tensor:
        missing = self.vocab_size - logits.shape[-1]
        return (
            logits
            if self._rule.reads is not Reads.all or not missing
            else pad(logits, (0, missing), value=float("-inf"))
        )

    def _known(self, ids: Tensor) -> Tensor:
        """Replace ids that only the target's larger vocabulary has by the draft's last id; any draft is valid."""
        is_narrower = self.runner.vocab_size < self.vocab_size
        return ids.clamp(max=self.runner.vocab_size - 1) if is_narrower else ids


def make(parts: DrafterParts) -> Drafter:
    """Make the drafter on a rank that holds the draft model or a slice of it; see `drafters.maker`."""
    runner, tokenizers = parts.runner, parts.tokenizers
    if parts.taps:  # which only a head reads
        assert parts.head
        kind: Any = OnePassDrafter if hasattr(parts.head, "draft") else HeadDrafter
        drafter: HeadDrafter = kind(
            parts.head,
            parts.taps,
            rule=parts.rule,
            num_draft_tokens=parts.num_draft_tokens,
            first_row=parts.first_row,
            tree=parts.tree,
        )
        return drafter
    assert runner
    size, num_draft_tokens = runner.vocab_size, parts.num_draft_tokens
    if tokenizers is None:
        return ModelDrafter(
            runner, rule=parts.rule, num_draft_tokens=num_draft_tokens, vocab_size=parts.vocab_size, tree=parts.tree,
            num_ahead=parts.num_ahead,
        )  # fmt: skip
    alignment = tokenizers.align(target_size=parts.vocab_size, draft_size=size)
    return IntersectionDrafter(
        runner,
        rule=parts.rule,
        num_draft_tokens=num_draft_tokens,
        vocabularies=VocabularyMap.of(alignment, draft_size=size, device=runner.device),
        encode=lambda ids: tokenizers.into_draft(ids, size=size),
        comm=parts.comm,
    )

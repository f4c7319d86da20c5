"""A smaller model as the drafter.

Shapes: B sequences, S slots, K drafted tokens, P = 2 uniforms per draw, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.models.cache import Workspace
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.settings.drafters import Matching, matching_of
from llama_ssp.shapes import static_shape
from llama_ssp.speculate.drafters.drafter import CatchUp, Drafter, DrafterParts
from llama_ssp.speculate.drafters.intersection import IntersectionDrafter, VocabularyMap
from llama_ssp.speculate.drafters.retokenized import RetokenizedDrafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Draft, Rule


class _Tables(Workspace):
    """Constants of a batch size: the index of the token that the first step scores, and zero probabilities."""

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device) -> None:
        self.batch_size = batch_size
        self.second_B1 = torch.ones(batch_size, 1, dtype=torch.int64, device=device)
        self.nothing_BV = torch.zeros(batch_size, vocab_size, device=device)


@dataclass(eq=False, repr=False)
class ModelDrafter:
    """Drafts with a model, under the same processors as the target.

    The first step of a round always reads the last two tokens, rewriting one cache slot: after a fully accepted round
    the cache lacks the last drafted token, and reading two keeps the shape the same whatever was accepted.

    Attributes:
        num_draft_tokens: the most tokens that a round drafts.
        vocab_size: V of the target; the draft's logits are cut or padded to it.
    """

    runner: Runner
    _: KW_ONLY
    rule: Rule
    num_draft_tokens: int
    vocab_size: int

    on_host = False
    is_point_mass = False
    reads_skipped = True

    def __post_init__(self) -> None:
        self._last_two = torch.arange(-2, 0, device=self.runner.device)
        self._offsets_K = torch.arange(self.num_draft_tokens, device=self.runner.device)
        self._catch_up = CatchUp(self.runner)
        self._tables: _Tables | None = None

    @property
    def repeats_operators(self) -> bool:
        """See `Drafter`."""
        return self.runner.repeats_operators

    @property
    def reads_by_length(self) -> bool:
        """See `Drafter`."""
        return self.runner.reads_by_length

    @property
    def num_allocations(self) -> int:
        """Allocations of the model; the drafter's own tensors are replaced only together with the model's cache."""
        return self.runner.num_allocations

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate the cache."""
        self.runner.allocate(batch_size=batch_size, capacity=num_slots)
        if self._tables is None or batch_size != self._tables.batch_size:
            self._tables = _Tables(batch_size, self.vocab_size, self.runner.device)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts into the draft's own cache."""
        known = prompts._replace(tokens_RS=self._known(prompts.tokens_RS))
        read_prompts(self.runner, known, rows=rows, buckets=buckets)

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draw K tokens one after another; see `Drafter.propose`."""
        assert self._tables, "allocate comes first"
        tokens_BS, lengths_B, _ = rows
        self._catch_up.read(
            tokens_BS, lengths_B[:, None], num_unread=num_unread, num_kept=2, bucket=bucket, known=self._known
        )
        positions_BT = lengths_B[:, None] + self._last_two
        wanted_B1: Tensor | None = self._tables.second_B1
        ids_BT = self._known(tokens_BS.gather(1, positions_BT))
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        for step, uniforms_BP in zip(range(num_tokens), uniforms_BKP.unbind(1), strict=True):
            if step:
                positions_BT, wanted_B1 = positions_BT[:, -1:] + 1, None
                ids_BT = self._known(drafted[-1])
            logits_BV = self.runner.forward(ids_BT, positions_BT, bucket=bucket, score_positions_BR=wanted_B1)[:, 0]
            if missing := self.vocab_size - static_shape(logits_BV)[-1]:
                logits_BV = pad(logits_BV, (0, missing), value=float("-inf"))
            context = rows.before(positions_BT[:, -1:]) if self.rule.needs_context else None
            ids_B1, probs_BV = self.rule.draw(logits_BV, uniforms_BP, context)
            drafted.append(ids_B1)
            if context:  # the next one looks at this token too
                tokens_BS.scatter_(1, positions_BT[:, -1:] + 1, drafted[-1])
            if probs_BV is not None:
                probs.append(probs_BV)
        ids_BK = torch.cat(drafted, dim=1)
        tokens_BS.scatter_(1, lengths_B[:, None] + self._offsets_K[:num_tokens], ids_BK)
        probs_BTV = torch.stack([*probs, self._tables.nothing_BV], dim=1) if probs else None
        return Draft(ids_BK=ids_BK, probs_BTV=probs_BTV)

    def _known(self, ids: Tensor) -> Tensor:
        """Replace ids that only the target's larger vocabulary has by the draft's last id; any draft is valid."""
        is_narrower = self.runner.vocab_size < self.vocab_size
        return ids.clamp(max=self.runner.vocab_size - 1) if is_narrower else ids


def make(parts: DrafterParts) -> Drafter:
    """Make the drafter on a rank that holds the draft model or a slice of it; see `drafters.maker`."""
    runner, num_draft_tokens = parts.runner, parts.num_draft_tokens
    assert runner
    if parts.tokenizers is None:
        return ModelDrafter(runner, rule=parts.rule, num_draft_tokens=num_draft_tokens, vocab_size=parts.vocab_size)
    if matching_of(parts.config) is Matching.text:
        return RetokenizedDrafter(
            runner, num_draft_tokens=num_draft_tokens, tokenizers=parts.tokenizers, comm=parts.comm
        )
    size = runner.vocab_size
    alignment = parts.tokenizers.align(target_size=parts.vocab_size, draft_size=size)
    return IntersectionDrafter(
        runner,
        rule=parts.rule,
        num_draft_tokens=num_draft_tokens,
        vocabularies=VocabularyMap.of(alignment, draft_size=size, device=runner.device),
        translator=parts.tokenizers.into_draft(size=size),
        comm=parts.comm,
    )

"""The exact law of the text that several rounds of a drafter make, with the caches that every round leaves behind.

Rows of a batch are all outcomes: a round is run along every draft that can be drawn, its verdicts have the law that
`exact_law.choice_law` measures of the rule, and each outcome goes on with the cache that its round has left. After the
last round a text is drawn from the target's law, so that the law of all texts must be the target's.

Shapes: B rows, N drafts, K drafted tokens, T = K + 1, V vocabulary, S slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.rules import Rule
from llama_ssp.speculate.sampling.uniforms import PER_DRAW, Draws
from tests.helpers.exact_law import choice_law, codes_of
from tests.helpers.layered_tables import LayeredTables

NUM_SLOTS = 24


class Along(Rule):
    """A rule that drafts given tokens, with the law that it would have drawn them from."""

    def __init__(self, rule: Rule) -> None:
        self.__dict__.update(vars(rule))
        self.path_BK: Tensor | None = None

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Any = None) -> Any:
        """See `Rule.draw`."""
        ids_B1, probs_B1V = super().draw(logits_BTV, uniforms_BTP, context)
        if self.path_BK is not None:
            ids_B1, self.path_BK = self.path_BK[:, :1], self.path_BK[:, 1:]
        return ids_B1, probs_B1V


@dataclass
class Texts:
    """Rows of a batch between rounds, with the probability of each, and what each of its caches holds."""

    tokens_BS: Tensor
    lengths_B: Tensor
    law_B: Tensor
    held: Sequence[Tensor]

    def some(self, rows_B: Tensor) -> "Texts":
        """Some of the rows."""
        held = [each.index_select(1, rows_B) for each in self.held]
        return Texts(self.tokens_BS[rows_B], self.lengths_B[rows_B], self.law_B[rows_B], held)


class Rounds:
    """Rounds of a drafter, made by `make` for a target, a rule and a number of rows.

    `make` returns also the models whose caches a row is made of.
    """

    def __init__(
        self, target: LayeredTables, rule: Rule, make: Callable[..., tuple[Drafter, Sequence[Any]]], *, num_drafted: int
    ) -> None:
        self.target, self.rule, self._make, self._num_drafted = target, Along(rule), make, num_drafted
        paths = product(range(target.vocab_size), repeat=num_drafted)
        self.paths_NK = torch.tensor([*paths])
        self.said = list[tuple[list[int], list[int], Tensor]]()

    def begin(self, text: Sequence[int]) -> Texts:
        """A row that has read a text but for its last token."""
        tokens_BS = torch.zeros(1, NUM_SLOTS, dtype=torch.long)
        tokens_BS[0, : len(text)] = torch.tensor(text)
        some = torch.ones(1)
        _, models = self._of(Texts(tokens_BS, some.long() * len(text), some.double(), ()))
        positions_1T = torch.arange(len(text) - 1)[None]
        for model in models:
            model.forward(tokens_BS[:, : len(text) - 1], positions_1T, bucket=NUM_SLOTS)
        return Texts(tokens_BS, some.long() * len(text), some.double(), self._held(models))

    def _of(self, texts: Texts) -> tuple[Drafter, Sequence[Any]]:
        drafter, models = self._make(self.target, self.rule, batch_size=len(texts.lengths_B), num_slots=NUM_SLOTS)
        layers = [layer for model in models for layer in model.cache.in_rows()]
        for layer, kept in zip(layers, texts.held, strict=False):
            layer.copy_(kept)
        return drafter, models

    def _held(self, models: Sequence[Any]) -> list[Tensor]:
        return [layer.clone() for model in models for layer in model.cache.in_rows()]

    def _propose(self, drafter: Drafter, texts: Texts, uniforms_BKP: Tensor) -> Draft:
        lengths_B = texts.lengths_B
        rows = Rows(texts.tokens_BS.clone(), lengths_B, torch.zeros_like(lengths_B), lengths_B)
        return drafter.propose(rows, num_tokens=self._num_drafted, uniforms_BKP=uniforms_BKP, bucket=NUM_SLOTS)

    def drafted_law(self, texts: Texts) -> Tensor:
        """The law (B, N) of what is drafted, measured of the drafter's answers to uniform numbers."""

        def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
            some = texts.some(rows_B)
            draft = self._propose(self._of(some)[0], some, uniforms_BC.unflatten(1, (self._num_drafted, PER_DRAW)))
            return codes_of(draft.ids_BK, self.target.vocab_size)

        num_coordinates, num_answers = PER_DRAW * self._num_drafted, len(self.paths_NK)
        return choice_law(
            choose, num_rows=len(texts.lengths_B), num_coordinates=num_coordinates, num_answers=num_answers
        )

    def along(self, texts: Texts) -> tuple[Texts, Draft, Tensor]:
        """Run a round along every draft: rows (B N) after it, their drafts, and the target's logits (B N, T, V)."""
        num_rows, num_paths = len(texts.lengths_B), len(self.paths_NK)
        rows = texts.some(torch.arange(num_rows).repeat_interleave(num_paths))
        ids_BK = self.paths_NK.repeat(num_rows, 1)
        self.rule.path_BK = ids_BK
        drafter, models = self._of(rows)
        draft = self._propose(drafter, rows, torch.full((len(ids_BK), self._num_drafted, PER_DRAW), 0.5).double())
        self.rule.path_BK = None
        of_path_BK = draft.drawn_law[:, :-1].gather(2, ids_BK[..., None])[..., 0]
        first_B1 = rows.lengths_B[:, None] - 1
        read_BT = torch.cat([rows.tokens_BS.gather(1, first_B1), ids_BK], dim=1)
        positions_BT = first_B1 + torch.arange(self._num_drafted + 1)
        logits_BTV = models[0].forward(read_BT, positions_BT, bucket=NUM_SLOTS)
        for text, length, ids, law_TV in zip(
            rows.tokens_BS.tolist(), rows.lengths_B.tolist(), ids_BK.tolist(), draft.drawn_law, strict=True
        ):
            self.said.append((text[:length], ids, law_TV))
        after = Texts(rows.tokens_BS, rows.lengths_B, rows.law_B * of_path_BK.prod(1), self._held(models))
        return after, draft, logits_BTV

    def step(self, texts: Texts) -> Texts:
        """The rows after one more round, each with its outcome."""
        rows, draft, logits_BTV = self.along(texts)
        vocab_size, num_positions = self.target.vocab_size, self._num_drafted + 1
        probs_BTV = self.rule.process(logits_BTV)

        def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
            accept_BK, residual_BP = uniforms_BC.split([self._num_drafted, PER_DRAW], dim=1)
            unused_BTP = uniforms_BC.new_full((len(rows_B), num_positions, PER_DRAW), 0.5)
            draws = Draws(unused_BTP[:, 1:], accept_BK, residual_BP, unused_BTP)
            of_rows = Draft(draft.ids_BK[rows_B], draft.drawn_law[rows_B])
            verdict = self.rule.verify(of_rows, probs_BTV[rows_B], draws=draws)
            return (verdict.node_B1 * vocab_size + verdict.next_ids_B1)[:, 0]

        law_BA = choice_law(
            choose,
            num_rows=len(rows.lengths_B),
            num_coordinates=self._num_drafted + PER_DRAW,
            num_answers=num_positions * vocab_size,
        )
        rows_C, answers_C = (law_BA * rows.law_B[:, None]).nonzero().unbind(1)
        after = rows.some(rows_C)
        after.law_B = after.law_B * law_BA[rows_C, answers_C]
        accepted_C, next_C = answers_C // vocab_size, answers_C % vocab_size
        for row, (accepted, token) in enumerate(zip(accepted_C.tolist(), next_C.tolist(), strict=True)):
            length = int(after.lengths_B[row])
            after.tokens_BS[row, length : length + accepted] = draft.ids_BK[rows_C[row], :accepted]
            after.tokens_BS[row, length + accepted] = token
        after.lengths_B = after.lengths_B + accepted_C + 1
        return after

    def error(self, text: Sequence[int], *, num_rounds: int, process: Callable[[Tensor], Tensor]) -> float:
        """The largest difference between the law of texts behind `text` and the target's."""
        texts, most = self.begin(text), num_rounds * (self._num_drafted + 1)
        for _ in range(num_rounds):
            texts = self.step(texts)

        @cache
        def target_law(new: tuple[int, ...]) -> Tensor:
            logits_TV, _ = self.target.read([*text, *new], range(len(text) + len(new)))
            return process(logits_TV[-1:])[0]

        vocab_size = self.target.vocab_size
        found, wanted = (torch.zeros(1).double() for _ in range(2))
        wanted += 1
        for length in range(most):
            prefixes = product(range(vocab_size), repeat=length)
            law_NV = torch.stack([target_law(new) for new in prefixes])
            found, wanted = ((law_N[:, None] * law_NV).flatten() for law_N in (found, wanted))
            ended_B = texts.lengths_B == len(text) + length + 1
            new_BL = texts.tokens_BS[ended_B, len(text) : len(text) + length + 1]
            found.index_add_(0, codes_of(new_BL, vocab_size), texts.law_B[ended_B])
        return float((found - wanted).abs().max())

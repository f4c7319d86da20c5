"""What a head of one pass drafts has exactly the law that it says, and so the text has the target's; faults would show.

Shapes: G tables, B rows, N drafts, K drafted tokens, M nodes, V = 3 tokens, P = 2 uniforms of a draw.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.heads.one_pass_drafter import OnePassDrafter
from llama_ssp.extensions.heads.protocol import Confident, Following
from llama_ssp.extensions.heads.records import ConfidenceConfig
from llama_ssp.models.cache import Taps
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.decoders import parts_of
from tests.helpers.exact_law import choice_law, codes_of, law_error, processed
from tests.helpers.lanes import pairs
from tests.helpers.table_models import TableModel, joint_law, random_table

CPU, NUM_TABLES, NUM_TOKENS = torch.device("cpu"), 2, 3
Propose = Callable[[OnePassDrafter, Rows, int, Tensor], Draft]


class TableHead:
    """A head whose logits at each depth are a table's, or with `joins` one for each token drafted before."""

    device, tokens_ahead, mask_token_id = CPU, 1, NUM_TOKENS
    vocab_size = num_token_ids = NUM_TOKENS
    num_allocations, repeats_operators, reads_by_length = 0, True, True

    def __init__(self, tables: TableModel, *, joins: bool) -> None:
        self.tables, self.joins, self.shift = tables, joins, 0

    def allocate(self, **_sizes: object) -> None:
        """Nothing is cached."""

    def block_size(self, num_drafted: int) -> int:
        return num_drafted - 1

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        return taps_BTX

    def draft(self, ids_BT: Tensor, *_tensors: Tensor, **_sizes: int) -> Following:
        """The table of a row is the one that its first token names."""
        tables_B = ids_BT[:, 0] % NUM_TABLES

        def following(depth: int, ids_BM: Tensor, _parents_BM: Tensor | None) -> Tensor:
            logits_GCV = self.tables.logits[depth + self.shift]
            codes_BM = ids_BM if depth and self.joins else torch.zeros_like(ids_BM)
            return logits_GCV[tables_B[:, None], codes_BM]

        return following

    def law_tables(self, num_drafted: int) -> TableModel:
        """Its logits by prefix."""
        found = []
        for depth in range(num_drafted):
            last = torch.tensor(
                [prefix[-1] if prefix and self.joins else 0 for prefix in product(range(NUM_TOKENS), repeat=depth)]
            )
            found.append(self.tables.logits[depth][:, last])
        return TableModel(tuple(found))


def propose(drafter: OnePassDrafter, rows: Rows, num_tokens: int, uniforms_BKP: Tensor) -> Draft:
    return drafter.propose(rows, num_tokens=num_tokens, uniforms_BKP=uniforms_BKP, bucket=64)


def with_shared_noise(drafter: OnePassDrafter, rows: Rows, num_tokens: int, uniforms_BKP: Tensor) -> Draft:
    """A fault: all positions are drawn by the same numbers."""
    return propose(drafter, rows, num_tokens, uniforms_BKP[:, :1].expand_as(uniforms_BKP))


def with_next_law(drafter: OnePassDrafter, rows: Rows, num_tokens: int, uniforms_BKP: Tensor) -> Draft:
    """A fault: what was drawn is said to have the law of the next position."""
    draft, head = propose(drafter, rows, num_tokens, uniforms_BKP), vars(drafter)["_head"]
    head.shift = 1
    other = propose(drafter, rows, num_tokens, uniforms_BKP)
    head.shift = 0
    return draft._replace(law=other.law)


def errors(sampling: SamplingConfig, rule_name: str, *, joins: bool, num_drafted: int, propose: Propose) -> list[float]:
    """How far drafts are from the law that they say, and the text from the target's law."""
    target, tables = (
        random_table(seed=seed, num_tables=NUM_TABLES, max_length=num_drafted, vocab_size=NUM_TOKENS)
        for seed in (50, 60)
    )
    rule: Any = make_rule(sampling, VerificationConfig(rule=rule_name))
    head: Any = TableHead(tables, joins=joins)
    taps = Taps((0,), width=1, dtype=torch.float64, device=CPU)
    drafter = OnePassDrafter(parts_of(head, taps=taps, rule=rule, num_draft_tokens=num_drafted, vocab_size=NUM_TOKENS))

    def drafted(rows_B: Tensor, uniforms_BC: Tensor) -> Draft:
        taps.allocate(batch_size=len(rows_B), num_slots=16)
        drafter.allocate(batch_size=len(rows_B), num_slots=16)
        texts_BS = torch.zeros(len(rows_B), 16, dtype=torch.long)
        texts_BS[:, :2] = rows_B[:, None]
        lengths_B = torch.full((len(rows_B),), 2)
        rows = Rows(texts_BS, lengths_B, torch.zeros_like(lengths_B), lengths_B)
        return propose(drafter, rows, num_drafted, uniforms_BC.unflatten(1, (num_drafted, 2)))

    def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
        ids_BK = drafted(rows_B, uniforms_BC).ids_BK
        return codes_of(ids_BK, NUM_TOKENS)

    measured = choice_law(
        choose, num_rows=NUM_TABLES, num_coordinates=2 * num_drafted, num_answers=NUM_TOKENS**num_drafted
    )
    wanted = head.law_tables(num_drafted)
    laws = processed(wanted, sampling)
    said: list[float] = []
    for corner in product((0.1, 0.5, 0.9), repeat=num_drafted):
        draft = drafted(torch.arange(NUM_TABLES), torch.tensor(corner).double().repeat_interleave(2).repeat(2, 1))
        code_B = torch.zeros(NUM_TABLES, dtype=torch.long)
        for step, law_GCV in enumerate(laws):
            probs_BV = draft.drawn_law[:, step]
            said.append(float((probs_BV - law_GCV[torch.arange(NUM_TABLES), code_B]).abs().max()))
            code_B = code_B * NUM_TOKENS + draft.ids_BK[:, step]
    of_text = law_error(rule, sampling, target=target, draft=wanted, num_draft_tokens=num_drafted)
    return [float((measured - joint_law(laws)).abs().max()), max(said), of_text]


@pairs(rule_name=["speculative", "block"], joins=[False, True])
def test_drafts_have_the_law_that_they_say_and_the_text_the_target_s(rule_name: str, joins: bool) -> None:
    sampling = SamplingConfig(temperature=0.7, top_k=2)
    assert max(errors(sampling, rule_name, joins=joins, num_drafted=2, propose=propose)) < 1e-12


@pytest.mark.parametrize(("fault", "place"), [(with_shared_noise, 0), (with_next_law, 1)])
def test_a_fault_of_the_draft_would_be_found(fault: Propose, place: int) -> None:
    sampling = SamplingConfig(temperature=0.7)
    assert errors(sampling, "speculative", joins=True, num_drafted=2, propose=fault)[place] > 0.01


ESTIMATES_KV = torch.tensor([[2.0, 2.0, 2.0], [1.0, -1.0, 2.0], [-2.0, 1.0, -1.0]])
"""The logit of a position's acceptance by the token before it."""


class ConfidentHead(TableHead):
    """A table's head that estimates; a fault with `ahead`, by the position's own token."""

    ahead = 0

    def draft(self, ids_BT: Tensor, *_tensors: Tensor, **_sizes: int) -> Confident:
        def confidence(before_BK: Tensor) -> Tensor:
            before_BK = before_BK.roll(-self.ahead, dims=1) % NUM_TOKENS
            return ESTIMATES_KV[torch.arange(before_BK.shape[1]), before_BK]

        return Confident(super().draft(ids_BT), confidence)


def ended_law_error(rule_name: str, head: ConfidentHead, *, num_drafted: int) -> float:
    """How far a text is from the target's law where drafts end as the drafter says; the same head drafts for all."""
    sampling = SamplingConfig(temperature=0.7)
    made, taps = (
        make_rule(sampling, VerificationConfig(rule=rule_name)),
        Taps((0,), width=1, dtype=torch.float64, device=CPU),
    )
    drafter: Any = OnePassDrafter(
        parts_of(
            head,
            taps=taps,
            rule=made,
            num_draft_tokens=num_drafted,
            vocab_size=NUM_TOKENS,
            config=ConfidenceConfig(confidence=0.5),
        )
    )
    whole = made.verify

    def verify(draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        taps.allocate(batch_size=len(target_BTV), num_slots=16)
        drafter.allocate(batch_size=len(target_BTV), num_slots=16)
        lengths_B = torch.full((len(target_BTV),), 2)
        rows = Rows(torch.zeros(len(target_BTV), 16, dtype=torch.long), lengths_B, 0 * lengths_B, lengths_B)
        num_B1 = drafter._num_counted(drafter._reading(rows, bucket=64, num_unread=2), draft.ids_BK)
        own = draws._replace(plain_BTP=draws.residual_BP[:, None])
        return made.at_most(whole(draft, target_BTV, draws=draws), num_B1, target_BTV, draws=own)

    made.verify = verify  # type: ignore[method-assign]
    target = random_table(seed=50, num_tables=NUM_TABLES, max_length=num_drafted, vocab_size=NUM_TOKENS)
    return law_error(made, sampling, target=target, draft=head.law_tables(num_drafted), num_draft_tokens=num_drafted)


@pytest.mark.seconds
@pytest.mark.parametrize("rule_name", ["speculative", "block"])
def test_drafts_that_end_by_confidence_leave_the_text_its_law(rule_name: str) -> None:
    tables = random_table(seed=60, num_tables=NUM_TABLES, max_length=3, vocab_size=NUM_TOKENS)
    head = ConfidentHead(tables, joins=True)
    assert ended_law_error(rule_name, head, num_drafted=3) < 1e-12
    head.ahead = 1
    assert ended_law_error(rule_name, head, num_drafted=3) > 1e-3

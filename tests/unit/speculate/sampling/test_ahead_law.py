"""Drafting that overlaps verification: the law of the text, enumerated over every outcome of both streams.

A path is a text and the tokens in flight behind it. Each round drafts a block behind both, examines what is in flight
and the first new token, and keeps or drops the rest. The shipped function decides, at the borders of its choices.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple, cast

import pytest
import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft, Verdict
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_ahead
from llama_ssp.speculate.sampling.uniforms import PER_DRAW, Draws
from tests.helpers.exact_law import choice_law, draw_law
from tests.helpers.lanes import grid
from tests.helpers.table_models import TableModel, joint_law, random_table

SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k and top-p": SamplingConfig(temperature=1.0, top_k=2, top_p=0.7),
    "min-p": SamplingConfig(temperature=1.3, min_p=0.25),
    "greedy": SamplingConfig(temperature=0.0),
}
Decide = Callable[..., Verdict]
Path = tuple[tuple[int, ...], tuple[int, ...]]


class Rounds(NamedTuple):
    """All that can be drafted behind some paths: rows of what the target verifies, and the law of each row."""

    paths: list[Path]
    blocks: list[tuple[int, ...]]
    law_B: Tensor


def code(ids: tuple[int, ...], vocab_size: int) -> int:
    value = 0
    for token in ids:
        value = value * vocab_size + token
    return value


def at(tables: tuple[Tensor, ...], ids: tuple[int, ...]) -> Tensor:
    """What stands in the tables after a text (V)."""
    return tables[len(ids)][0, code(ids, tables[0].shape[-1])]


def drafted(paths: dict[Path, float], draft_law: tuple[Tensor, ...], *, num_drafted: int) -> Rounds:
    """Every block behind every path."""
    found, blocks, laws = [], [], []
    vocab_size = draft_law[0].shape[-1]
    for path, mass in paths.items():
        behind = path[0] + path[1]
        for block in product(range(vocab_size), repeat=num_drafted):
            each = [float(at(draft_law, behind + block[:place])[block[place]]) for place in range(num_drafted)]
            if law := mass * float(torch.tensor(each, dtype=torch.float64).prod()):
                found.append(path)
                blocks.append(block)
                laws.append(law)
    return Rounds(found, blocks, torch.tensor(laws, dtype=torch.float64))


def decided(rule: Rule, target: TableModel, draft: TableModel, rounds: Rounds, decide: Decide) -> Tensor:
    """The law (B, 2 K V) of each row's outcome: accepted tokens, the next one, and whether it goes on."""
    vocab_size, num_drafted = target.vocab_size, len(rounds.blocks[0])
    num_ahead = num_drafted - 1
    noise = torch.Generator().manual_seed(1)

    def probs_after(ids: tuple[int, ...]) -> Tensor | None:
        some_B1P = torch.full((1, 1, PER_DRAW), 0.5, dtype=torch.float64)
        probs_B1V = rule.draw(at(draft.logits, ids)[None, None], some_B1P)[1]
        return None if probs_B1V is None else probs_B1V[0, 0]

    rubbish = torch.rand(vocab_size, generator=noise, dtype=torch.float64)
    has_probs = probs_after(()) is not None
    ids, flying, follows, logits = [], [], [], []
    for text, flight in rounds.paths:
        # A row without a block in flight has rubbish in its place.
        ids.append(flight or (*torch.randint(vocab_size, (num_ahead,), generator=noise).tolist(),))
        places = range(num_ahead)
        scored = [
            at(target.logits, text + flight[:place]) if flight or not place else rubbish
            for place in (*places, num_ahead)
        ]
        logits.append(torch.stack(scored))
        if has_probs:
            before = [probs_after(text + flight[:place]) if flight else rubbish for place in places]
            flying.append(torch.stack([*before, rubbish]))  # type: ignore[list-item]
            follows.append(torch.stack([probs_after(text + flight), *[rubbish] * num_drafted]))  # type: ignore[list-item]
    in_flight = Draft(torch.tensor(ids).view(len(ids), num_ahead), torch.stack(flying) if has_probs else POINT_MASS)
    following = Draft(torch.tensor(rounds.blocks), torch.stack(follows) if has_probs else POINT_MASS)
    target_BKV, ahead_B = rule.process(torch.stack(logits)), torch.tensor([len(flight) for _, flight in rounds.paths])

    def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
        accept_BK, residual_BP = uniforms_BC.split([num_drafted, PER_DRAW], dim=1)
        unused_BP = torch.full_like(residual_BP, 0.5)
        verdict = decide(
            rule, some(in_flight, rows_B), some(following, rows_B).first(), target_BKV[rows_B], ahead_B=ahead_B[rows_B],
            draws=Draws(unused_BP[:, None].expand(-1, num_drafted, -1), accept_BK, residual_BP, unused_BP[:, None]),
        )  # fmt: skip
        goes_on_B1 = (verdict.node_B1 > ahead_B[rows_B, None]).long()
        return (((verdict.node_B1 - goes_on_B1) * vocab_size + verdict.next_ids_B1) * 2 + goes_on_B1)[:, 0]

    return choice_law(
        choose, num_rows=len(ids), num_coordinates=num_drafted + PER_DRAW, num_answers=2 * num_drafted * vocab_size
    )


def some(draft: Draft, rows_B: Tensor) -> Draft:
    return Draft(draft.ids_BK[rows_B], POINT_MASS if draft.is_certain else draft.drawn_law[rows_B])


def law_of_text(
    rule: Rule, target: TableModel, draft: TableModel, *, num_drafted: int, wanted: int, decide: Decide = verify_ahead
) -> Tensor:
    """The law (V^wanted) of the first tokens that overlapped rounds write."""
    vocab_size = target.vocab_size
    draft_law = tuple(draw_law(rule, logits) for logits in draft.logits)
    paths: dict[Path, float] = {((), ()): 1.0}
    law_C = torch.zeros(vocab_size**wanted, dtype=torch.float64)
    while paths:
        rounds = drafted(paths, draft_law, num_drafted=num_drafted)
        outcomes_BA = decided(rule, target, draft, rounds, decide) * rounds.law_B[:, None]
        paths = {}
        for row, answer in outcomes_BA.nonzero().tolist():
            (text, flight), block, mass = rounds.paths[row], rounds.blocks[row], float(outcomes_BA[row, answer])
            (num_accepted, token), goes_on = divmod(answer // 2, vocab_size), answer % 2
            longer = text + flight[:num_accepted] + (token,)
            if len(longer) >= wanted:
                law_C[code(longer[:wanted], vocab_size)] += mass
            else:
                after = (longer, block[1:] if goes_on else ())
                paths[after] = paths.get(after, 0.0) + mass
    return law_C


def error(rule_name: str, name: str, *, num_drafted: int, wanted: int, decide: Decide = verify_ahead) -> float:
    sampling, vocab_size = SAMPLINGS[name], 3 if num_drafted < 3 else 2
    longest = wanted + 2 * num_drafted - 2
    target, draft = (
        random_table(seed=seed, num_tables=1, max_length=longest, vocab_size=vocab_size) for seed in (51, 52)
    )
    rule = make_rule(sampling, VerificationConfig(rule=rule_name))
    law_C = law_of_text(rule, target, draft, num_drafted=num_drafted, wanted=wanted, decide=decide)
    if sampling.temperature:
        expected = joint_law(tuple(processor(sampling)(logits) for logits in target.logits[:wanted]))[0]
    else:
        best = tuple(torch.nn.functional.one_hot(logits.argmax(-1), vocab_size).double() for logits in target.logits)
        expected = joint_law(best[:wanted])[0]
    return float((law_C - expected).abs().max())


@grid(rule_name=["speculative", "block"], name=[*SAMPLINGS], size=[(1, 3), (2, 3), (3, 4)])
def test_overlapped_rounds_keep_the_targets_law(rule_name: str, name: str, size: tuple[int, int]) -> None:
    assert error(rule_name, name, num_drafted=size[0], wanted=size[1]) < 1e-12


def bonus_before_a_block(*drafts: object, ahead_B: Tensor, draws: Draws) -> Verdict:
    """A block that was drafted behind one token is kept behind another."""
    verdict = verify_ahead(*drafts, ahead_B=ahead_B, draws=draws)  # type: ignore[arg-type]
    best_B1 = cast("Tensor", drafts[-1])[:, -1].argmax(-1, keepdim=True)
    next_ids_B1 = torch.where(verdict.node_B1 > ahead_B[:, None], best_B1, verdict.next_ids_B1)
    return verdict._replace(next_ids_B1=next_ids_B1)


def block_behind_a_rejection(*drafts: object, ahead_B: Tensor, draws: Draws) -> Verdict:
    verdict = verify_ahead(*drafts, ahead_B=ahead_B, draws=draws)  # type: ignore[arg-type]
    return verdict._replace(node_B1=ahead_B[:, None] + 1)


def dropping(rule: Rule, *arguments: Tensor, ahead_B: Tensor, draws: Draws) -> Verdict:
    """Blocks are dropped from rows that go on plainly, which is no fault."""
    verdict = verify_ahead(rule, *arguments, ahead_B=ahead_B, draws=draws)  # type: ignore[arg-type]
    same = draws._replace(plain_BTP=draws.residual_BP[:, None])
    most_B1 = (ahead_B[:, None] == 0) * 9
    return rule.at_most(verdict, most_B1, arguments[-1], draws=same)


@pytest.mark.parametrize("decide", [bonus_before_a_block, block_behind_a_rejection, dropping])
def test_a_block_in_flight_behind_another_token_is_found(decide: Decide) -> None:
    found = error("speculative", "temperature", num_drafted=2, wanted=3, decide=decide)
    assert found < 1e-12 if decide is dropping else found > 1e-3

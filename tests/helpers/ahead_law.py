"""The law of a text whose drafting overlaps verification, enumerated over every outcome of both streams.

A path is a text and the tokens in flight behind it. Each round drafts a block behind both, examines what is in flight
and the first new token, and keeps or drops the rest. The shipped function decides, at the borders of its choices.

Shapes: B rows that are driven together, N paths, K drafted tokens, A outcomes, V vocabulary, P numbers of a draw.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft, Verdict
from llama_ssp.speculate.sampling.rules import Rule, verify_ahead
from llama_ssp.speculate.sampling.uniforms import PER_DRAW, Draws
from tests.helpers.exact_law import choice_law, draw_law
from tests.helpers.table_models import TableModel

Decide = Callable[..., Verdict]


class Path(NamedTuple):
    """A text, what is in flight behind it, and the rounds before, if they count: lengths and what was in flight."""

    text: tuple[int, ...] = ()
    flight: tuple[int, ...] = ()
    before: tuple[tuple[int, tuple[int, ...]], ...] = ()


Score = Callable[[Sequence[Path], int], Tensor]
"""From paths, and the number of tokens in flight where any are, to the target's logits (N, K, V) after each of them."""


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
        behind = path.text + path.flight
        for block in product(range(vocab_size), repeat=num_drafted):
            each = [float(at(draft_law, behind + block[:place])[block[place]]) for place in range(num_drafted)]
            if law := mass * float(torch.tensor(each, dtype=torch.float64).prod()):
                found.append(path)
                blocks.append(block)
                laws.append(law)
    return Rounds(found, blocks, torch.tensor(laws, dtype=torch.float64))


def table_scores(target: TableModel) -> Score:
    """The logits of a table, and rubbish behind rows without a block in flight."""
    noise = torch.Generator().manual_seed(1)

    def score(paths: Sequence[Path], num_ahead: int) -> Tensor:
        rubbish = torch.rand(target.vocab_size, generator=noise, dtype=torch.float64)
        return torch.stack(
            [
                torch.stack(
                    [
                        at(target.logits, text + flight[:place]) if flight or not place else rubbish
                        for place in range(num_ahead + 1)
                    ]
                )
                for text, flight, _ in paths
            ]
        )

    return score


def decided(rule: Rule, score: Score, draft: TableModel, rounds: Rounds, decide: Decide) -> Tensor:
    """The law (B, 2 K V) of each row's outcome: accepted tokens, the next one, and whether it goes on."""
    vocab_size, num_drafted = draft.vocab_size, len(rounds.blocks[0])
    num_ahead = num_drafted - 1
    noise = torch.Generator().manual_seed(1)

    def probs_after(ids: tuple[int, ...]) -> Tensor | None:
        some_B1P = torch.full((1, 1, PER_DRAW), 0.5, dtype=torch.float64)
        probs_B1V = rule.draw(at(draft.logits, ids)[None, None], some_B1P)[1]
        return None if probs_B1V is None else probs_B1V[0, 0]

    rubbish = torch.rand(vocab_size, generator=noise, dtype=torch.float64)
    has_probs = probs_after(()) is not None
    ids, flying, follows = [], [], []
    for text, flight, _ in rounds.paths:
        # A row without a block in flight has rubbish in its place.
        ids.append(flight or (*torch.randint(vocab_size, (num_ahead,), generator=noise).tolist(),))
        if has_probs:
            before = [probs_after(text + flight[:place]) if flight else rubbish for place in range(num_ahead)]
            flying.append(torch.stack([*before, rubbish]))  # type: ignore[list-item]
            follows.append(torch.stack([probs_after(text + flight), *[rubbish] * num_drafted]))  # type: ignore[list-item]
    distinct = [*dict.fromkeys(rounds.paths)]
    places = {path: place for place, path in enumerate(distinct)}
    logits_BKV = score(distinct, num_ahead)[[places[path] for path in rounds.paths]]
    in_flight = Draft(torch.tensor(ids).view(len(ids), num_ahead), torch.stack(flying) if has_probs else POINT_MASS)
    following = Draft(torch.tensor(rounds.blocks), torch.stack(follows) if has_probs else POINT_MASS)
    target_BKV, ahead_B = rule.process(logits_BKV), torch.tensor([len(path.flight) for path in rounds.paths])

    def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
        accept_BK, residual_BP = uniforms_BC.split([num_drafted, PER_DRAW], dim=1)
        unused_BP = torch.full_like(residual_BP, 0.5)
        verdict = decide(
            rule,
            some(in_flight, rows_B),
            some(following, rows_B).first(),
            target_BKV[rows_B],
            ahead_B=ahead_B[rows_B],
            draws=Draws(unused_BP[:, None].expand(-1, num_drafted, -1), accept_BK, residual_BP, unused_BP[:, None]),
        )
        goes_on_B1 = (verdict.node_B1 > ahead_B[rows_B, None]).long()
        return (((verdict.node_B1 - goes_on_B1) * vocab_size + verdict.next_ids_B1) * 2 + goes_on_B1)[:, 0]

    return choice_law(
        choose, num_rows=len(ids), num_coordinates=num_drafted + PER_DRAW, num_answers=2 * num_drafted * vocab_size
    )


def some(draft: Draft, rows_B: Tensor) -> Draft:
    return Draft(draft.ids_BK[rows_B], POINT_MASS if draft.is_certain else draft.drawn_law[rows_B])


def law_of_text(
    rule: Rule,
    score: Score,
    draft: TableModel,
    *,
    num_drafted: int,
    wanted: int,
    decide: Decide = verify_ahead,
    remembers: bool = False,
) -> Tensor:
    """The law (V^wanted) of the first tokens that overlapped rounds write.

    If it `remembers`, paths with other rounds before are others.
    """
    vocab_size = draft.vocab_size
    draft_law = tuple(draw_law(rule, logits) for logits in draft.logits)
    paths = {Path(): 1.0}
    law_C = torch.zeros(vocab_size**wanted, dtype=torch.float64)
    while paths:
        rounds = drafted(paths, draft_law, num_drafted=num_drafted)
        outcomes_BA = decided(rule, score, draft, rounds, decide) * rounds.law_B[:, None]
        paths = {}
        for row, answer in outcomes_BA.nonzero().tolist():
            (text, flight, before), mass = rounds.paths[row], float(outcomes_BA[row, answer])
            (num_accepted, token), goes_on = divmod(answer // 2, vocab_size), answer % 2
            longer = text + flight[:num_accepted] + (token,)
            if len(longer) >= wanted:
                law_C[code(longer[:wanted], vocab_size)] += mass
            else:
                rest = rounds.blocks[row][1:] if goes_on else ()
                after = Path(longer, rest, (*before, (len(text), flight)) if remembers else ())
                paths[after] = paths.get(after, 0.0) + mass
    return law_C

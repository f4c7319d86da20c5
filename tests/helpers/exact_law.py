"""The exact law of the text that a rule makes, measured by driving the rule itself at the borders of its choices.

What a rule answers is piecewise constant in each of its uniform numbers. The harness finds the borders by bisection of
the answers (it has no formula of its own that could agree with a wrong rule), and adds up the volumes of the pieces.
Every round starts from an empty prefix; the text after the round is drawn token by token by the rule's own `draw`.
If that has the target's law for every table, then by induction so do all later rounds. The draft is a table too, or a
drafter, which is then driven in the same way.

Shapes: G tables, V vocabulary, K drafted tokens, B rows that are driven together, C coordinates (uniform numbers),
P = 2 numbers of a draw.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llama_ssp.settings.processors import filters
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.sampling import rules
from llama_ssp.speculate.sampling.context import Context, Rows
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.row_steps import MANY, RowSteps
from llama_ssp.speculate.sampling.rules import Rule
from llama_ssp.speculate.sampling.uniforms import PER_DRAW, Draws
from tests.helpers.table_models import TableModel, joint_law

LARGEST_UNIFORM = 1 - 2.0**-53
_SAME_BORDER = 1e-14

Choice = Callable[[Tensor, Tensor], Tensor]
"""From rows (B,) and their uniform numbers (B, C) to the answers (B,), as non-negative integers."""

EVERY_STEP = RowSteps(
    has_greedy=True, filters=frozenset([one.name for one in filters()]), penalizes=True, most=MANY, limits=True
)
"""What rows with any settings need."""


def exact_law(
    rule: Rule,
    *,
    target: TableModel,
    draft: TableModel | Drafter,
    num_draft_tokens: int,
    is_point_mass: bool = False,
    prompt: tuple[int, ...] = (),
    settings_GX: Tensor | None = None,
) -> Tensor:
    """Measure the law of the first K + 1 tokens of a text.

    Args:
        rule: the rule under test.
        target: tables for prefixes of at least K tokens.
        draft: tables for prefixes of at least K - 1 tokens, or a drafter whose `propose` reads the rows alone and takes
            `Rows.forced_BK`; the prompt then has at least two tokens.
        num_draft_tokens: K.
        is_point_mass: the draft takes its best token, and says no probabilities.
        prompt: tokens before the text, for rules that look at them.
        settings_GX: of the rows of each table, for rules whose rows have some (`sampling.by_row`).

    Returns fp64 (G, V^(K + 1)), exact to about 1e-14.
    """
    texts = round_law(
        rule, target, draft, num_draft_tokens, is_point_mass=is_point_mass, prompt=prompt, settings_GX=settings_GX
    )
    law = texts[0]
    for length, text_law in enumerate(texts[1:], start=1):
        law = text_law + (law[..., None] * draw_law(rule, target.logits[length], prompt, settings_GX)).flatten(1)
    return law


def law_error(rule: Rule, sampling: SamplingConfig, *, target: TableModel, **how: Any) -> float:
    """The largest difference between `exact_law` and the target's law; at temperature 0 its best text's."""
    best = TableModel(tuple(one_hot(logits.argmax(-1), target.vocab_size).double() for logits in target.logits))
    law = processed(target, sampling) if sampling.temperature else best.logits
    return float((exact_law(rule, target=target, **how) - joint_law(law)).abs().max())


def processed(model: TableModel, sampling: SamplingConfig) -> tuple[Tensor, ...]:
    """The conditional laws of a table's texts."""
    return tuple(map(processor(sampling), model.logits))


def race_law(rule: Rule, target: TableModel, num_draft_tokens: int) -> tuple[Tensor, float]:
    """Measure the law of the first K + 1 tokens under a rule that takes the winners of races.

    Which token wins a place against one other changes where their numbers have a certain ratio, which is found by
    bisection of the rule's verdicts; independent exponential numbers have the ratios' law in closed form. Returns
    also how much a token's probability depends on the draft; AssertionError if a border depends on more than a ratio.
    """
    most_spread, law, num_paths = (
        0.0,
        target.logits[0].new_ones(target.num_tables, 1),
        target.vocab_size**num_draft_tokens,
    )
    for place in range(num_draft_tokens + 1):
        at_half, at_three = (_borders_of_races(rule, target, num_draft_tokens, place, size) for size in (0.5, 3.0))
        assert torch.allclose(at_half, at_three, rtol=1e-12, atol=0), "of the ratio alone"
        of_paths_GNV = 1 / (1 + at_half.sum(-1))
        by_prefix = of_paths_GNV.unflatten(1, (target.vocab_size**place, num_paths // target.vocab_size**place))
        spread_GN = (by_prefix.amax(2) - by_prefix.amin(2)).amax(-1)
        most_spread = max(most_spread, float(spread_GN[law > 0].max()))
        law = (law[..., None] * by_prefix[:, :, 0].where(law[..., None] > 0, 0.0)).flatten(1)
    return law, most_spread


def _borders_of_races(rule: Rule, target: TableModel, num_draft_tokens: int, place: int, size: float) -> Tensor:
    """Ratios (G, N, V, V), for drafts N, below which the last token's number lets it win against the one before.

    They are infinite for a token that never wins, and 0 against a token that never does, or itself.
    """
    vocab_size, num_tables = target.vocab_size, target.num_tables
    paths_NK = torch.tensor(list(product(range(vocab_size), repeat=num_draft_tokens)))
    lengths = range(num_draft_tokens + 1)
    scored = [target.logits[length][:, codes_of(paths_NK[:, :length], vocab_size)] for length in lengths]
    num_pairs, num_rows = vocab_size**2, num_tables * len(paths_NK)
    logits_LTV = torch.stack(scored, dim=2).flatten(0, 1).repeat_interleave(num_pairs, dim=0)
    ids_LK = paths_NK.repeat(num_tables, 1).repeat_interleave(num_pairs, dim=0)
    one_L, other_L = (each.repeat(num_rows) for each in torch.tensor([*product(range(vocab_size), repeat=2)]).T)
    context = _context((), ids_LK, None, num_scored=num_draft_tokens + 1)
    numbers_LTV = torch.full_like(logits_LTV, 1e30)
    numbers_LTV[:, :place].scatter_(2, ids_LK[:, :place, None], 1e-30)  # the draft wins before
    numbers_LTV[:, place].scatter_(1, one_L[:, None], size)
    drafted_L1 = torch.cat([ids_LK, ids_LK[:, :1] * 0], dim=1)[:, place, None]

    def wins(ratio_L: Tensor) -> Tensor:
        """Whether the one wins the place."""
        given_LTV = numbers_LTV.clone()
        is_other_L = one_L != other_L
        given_LTV[is_other_L, place, other_L[is_other_L]] = size * ratio_L[is_other_L]
        with patch.object(rules, "exponentials", lambda *_, **__: given_LTV):
            draws = Draws(
                *(
                    given_LTV.new_full((len(one_L), *shape), 0.5)
                    for shape in (
                        (num_draft_tokens, PER_DRAW),
                        (num_draft_tokens,),
                        (PER_DRAW,),
                        (num_draft_tokens + 1, PER_DRAW),
                    )
                )
            )
            verdict = rule.verify(Draft(ids_LK), rule.process(logits_LTV, context), draws=draws)
        token_L1 = torch.where(verdict.node_B1 > place, drafted_L1, verdict.next_ids_B1)
        return token_L1[:, 0].eq(one_L) & verdict.node_B1[:, 0].ge(place)

    low_L, high_L = numbers_LTV.new_full((len(one_L),), 1e-18), numbers_LTV.new_full((len(one_L),), 1e18)
    always_L, never_L = wins(low_L), ~wins(high_L)
    for _ in range(64):
        middle_L = (low_L.log() + high_L.log()).div(2).exp()
        is_won_L = wins(middle_L)
        low_L, high_L = torch.where(is_won_L, low_L, middle_L), torch.where(is_won_L, middle_L, high_L)
    found_L = high_L.masked_fill(always_L, 0.0).masked_fill(never_L, math.inf)
    return found_L.view(num_tables, len(paths_NK), vocab_size, vocab_size)


def round_law(
    rule: Rule,
    target: TableModel,
    draft: TableModel | Drafter,
    num_draft_tokens: int,
    *,
    keeps_N: Tensor | None = None,
    **how: Any,
) -> list[Tensor]:
    """Measure the law of what one round adds: for n = 0..K accepted tokens, of the n + 1 new ones, (G, V^(n + 1)).

    `keeps_N` says which of the V^K drafts count, all by default.
    """
    vocab_size, laws = target.vocab_size, []
    paths_NK, path_law_GN, verdict_law_GNTV = round_verdicts(rule, target, draft, num_draft_tokens, **how)
    if keeps_N is not None:
        path_law_GN = path_law_GN * keeps_N
    for num_accepted in range(num_draft_tokens + 1):
        text_law_GNV = path_law_GN[..., None] * verdict_law_GNTV[:, :, num_accepted]
        accepted_N = codes_of(paths_NK[:, :num_accepted], vocab_size)
        text_codes = (accepted_N[:, None] * vocab_size + torch.arange(vocab_size)).flatten()
        law = target.logits[0].new_zeros(target.num_tables, vocab_size ** (num_accepted + 1))
        laws.append(law.index_add_(1, text_codes, text_law_GNV.flatten(1)))
    return laws


def mean_accepted(rule: Rule, *, target: TableModel, draft: TableModel, num_draft_tokens: int) -> Tensor:
    """Measure how many drafted tokens a round accepts on average, fp64 (G,); see `exact_law`."""
    _, path_law_GN, verdict_law_GNTV = round_verdicts(rule, target, draft, num_draft_tokens)
    mean_GN = verdict_law_GNTV.sum(-1) @ torch.arange(num_draft_tokens + 1, dtype=torch.float64)
    return (path_law_GN * mean_GN).sum(-1)


def round_verdicts(
    rule: Rule,
    target: TableModel,
    draft: TableModel | Drafter,
    num_draft_tokens: int,
    *,
    is_point_mass: bool = False,
    prompt: tuple[int, ...] = (),
    settings_GX: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All drafts (N, K), the law (G, N) of each, and the law (G, N, K + 1, V) of the verdicts on it."""
    vocab_size = target.vocab_size
    paths_NK = torch.tensor(list(product(range(vocab_size), repeat=num_draft_tokens)))
    if not isinstance(draft, TableModel):
        path_law_GN, draft_probs_GNTV = _proposing(draft, paths_NK, prompt, target)
    elif is_point_mass:
        path_law_GN, draft_probs_GNTV = _best_path(draft, paths_NK)
    else:
        path_law_GN, draft_probs_GNTV = _drafting(rule, draft, paths_NK, prompt, settings_GX)
    lengths = range(num_draft_tokens + 1)
    scored = [target.logits[length][:, codes_of(paths_NK[:, :length], vocab_size)] for length in lengths]
    verdict_law_GNTV = _verifying(
        rule,
        prompt,
        paths_NK=paths_NK,
        draft_probs_GNTV=draft_probs_GNTV,
        target_logits_GNTV=torch.stack(scored, dim=2),
        settings_GX=settings_GX,
    )
    return paths_NK, path_law_GN, verdict_law_GNTV


def draw_law(rule: Rule, logits: Tensor, prompt: tuple[int, ...] = (), settings_GX: Tensor | None = None) -> Tensor:
    """Measure the law of the rule's `draw` for logits (G, V^t, V) of all prefixes; the result has their shape."""
    rows_BV = logits.flatten(0, -2)
    context = _after_prefixes(prompt, logits, settings_GX)

    def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
        return rule.draw(rows_BV[rows_B, None], uniforms_BC[:, None], _rows_of(context, rows_B))[0][:, 0]

    return choice_law(choose, num_rows=rows_BV.shape[0], num_coordinates=PER_DRAW, num_answers=logits.shape[-1]).view(
        logits.shape
    )


def _after_prefixes(prompt: tuple[int, ...], logits: Tensor, settings_GX: Tensor | None) -> Context:
    """The contexts (G V^t) of logits (G, V^t, V): the prompt, and the prefix that the code stands for."""
    num_tables, num_prefixes, vocab_size = logits.shape
    length = round(math.log(num_prefixes, vocab_size))
    prefixes = torch.tensor([*product(range(vocab_size), repeat=length)], dtype=torch.long).view(num_prefixes, length)
    return _context(prompt, prefixes.repeat(num_tables, 1), settings_GX, num_scored=1)


def _context(prompt: tuple[int, ...], texts_BS: Tensor, settings_GX: Tensor | None, *, num_scored: int) -> Context:
    """The context of the last positions of some texts; a token behind them is there to be overlooked."""
    num_rows, length = texts_BS.shape
    prompts = torch.tensor(prompt, dtype=torch.long).expand(num_rows, -1)
    tokens_BS = torch.cat([prompts, texts_BS, torch.zeros(num_rows, 1, dtype=torch.long)], dim=1)
    last_BT = len(prompt) + length - num_scored + torch.arange(num_scored).expand(num_rows, -1)
    prompt_lengths_B = torch.full((num_rows,), len(prompt))
    steps = None if settings_GX is None else EVERY_STEP
    settings_GX = torch.zeros(1, 0) if settings_GX is None else settings_GX
    settings_BX = settings_GX.repeat_interleave(num_rows // len(settings_GX), dim=0)
    return Context(tokens_BS, torch.zeros_like(prompt_lengths_B), prompt_lengths_B, last_BT, settings_BX, steps)


def _rows_of(context: Context, rows_B: Tensor) -> Context:
    return context.some(rows_B)


def _best_path(draft: TableModel, paths_NK: Tensor) -> tuple[Tensor, None]:
    """The law (G, N) of the drafted paths when every drafted token is the draft's best one."""
    path_law_GN = draft.logits[0].new_ones(draft.num_tables, paths_NK.shape[0])
    for position in range(paths_NK.shape[1]):
        codes_N = codes_of(paths_NK[:, :position], draft.vocab_size)
        best_GN = draft.logits[position].argmax(-1)[:, codes_N]
        path_law_GN = path_law_GN * (best_GN == paths_NK[:, position])
    return path_law_GN, None


def _drafting(
    rule: Rule, draft: TableModel, paths_NK: Tensor, prompt: tuple[int, ...], settings_GX: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The law (G, N) of the drafted paths, and the probabilities (G, N, K + 1, V) that the rule keeps for each."""
    path_law_GN = draft.logits[0].new_ones(draft.num_tables, paths_NK.shape[0])
    kept_probs = []
    for position in range(paths_NK.shape[1]):
        logits = draft.logits[position]
        codes_N = codes_of(paths_NK[:, :position], draft.vocab_size)
        path_law_GN = path_law_GN * draw_law(rule, logits, prompt, settings_GX)[:, codes_N, paths_NK[:, position]]
        some_B1P = logits.new_full((logits.shape[0] * logits.shape[1], 1, PER_DRAW), 0.5)
        _, probs = rule.draw(logits.flatten(0, 1)[:, None], some_B1P, _after_prefixes(prompt, logits, settings_GX))
        kept_probs.append(None if probs is None else probs.view(logits.shape)[:, codes_N])
    probs_K = [probs for probs in kept_probs if probs is not None]
    return path_law_GN, torch.stack([*probs_K, torch.zeros_like(probs_K[0])], dim=2) if probs_K else None


def _proposing(
    drafter: Drafter, paths_NK: Tensor, prompt: tuple[int, ...], target: TableModel
) -> tuple[Tensor, Tensor | None]:
    """The law of the paths that a drafter draws, and the law that it states for each; see `_drafting`.

    Each token is drawn after the tokens before it on the path, which the drafter is made to take.
    """
    num_paths, num_draft_tokens = paths_NK.shape
    vocab_size, num_slots = target.vocab_size, len(prompt) + num_draft_tokens
    drafter.allocate(batch_size=num_paths, num_slots=num_slots)
    path_law_N, stated = torch.ones(num_paths, dtype=torch.float64), list[Tensor]()
    for place in range(num_draft_tokens):
        forced_NK = paths_NK.masked_fill(torch.arange(num_draft_tokens) >= place, -1)

        def propose(rows_B: Tensor, uniforms_BP: Tensor, forced_NK: Tensor = forced_NK, place: int = place) -> Draft:
            tokens_BS = torch.zeros(len(rows_B), num_slots + 1, dtype=torch.long)
            tokens_BS[:, : len(prompt)] = torch.tensor(prompt)
            lengths_B = torch.full_like(rows_B, len(prompt))
            uniforms_BKP = uniforms_BP.new_full((len(rows_B), num_draft_tokens, PER_DRAW), 0.5)
            uniforms_BKP[:, place] = uniforms_BP
            rows = Rows(tokens_BS, lengths_B, torch.zeros_like(rows_B), lengths_B, forced_BK=forced_NK[rows_B])
            return drafter.propose(rows, num_tokens=num_draft_tokens, uniforms_BKP=uniforms_BKP, bucket=num_slots)

        def choose(rows_B: Tensor, uniforms_BP: Tensor, place: int = place, propose: Any = propose) -> Tensor:
            ids_B: Tensor = propose(rows_B, uniforms_BP).ids_BK[:, place]
            return ids_B

        law_NV = choice_law(choose, num_rows=num_paths, num_coordinates=PER_DRAW, num_answers=vocab_size)
        path_law_N *= law_NV.gather(1, paths_NK[:, place, None])[:, 0]
        draft = propose(torch.arange(num_paths), torch.full((num_paths, PER_DRAW), 0.5, dtype=torch.float64))
        stated += [] if draft.is_certain else [draft.drawn_law[:, place].double()]
    law_NTV = torch.stack([*stated, torch.zeros_like(stated[0])], dim=1) if stated else None
    path_law_GN = path_law_N.expand(target.num_tables, -1)
    return path_law_GN, None if law_NTV is None else law_NTV.expand(target.num_tables, *law_NTV.shape)


def _verifying(
    rule: Rule,
    prompt: tuple[int, ...],
    *,
    paths_NK: Tensor,
    draft_probs_GNTV: Tensor | None,
    target_logits_GNTV: Tensor,
    settings_GX: Tensor | None,
) -> Tensor:
    """The law (G, N, K + 1, V) of the number of accepted tokens and the token that follows them."""
    num_tables, num_paths, num_positions, vocab_size = target_logits_GNTV.shape
    num_draft_tokens = num_positions - 1
    ids_BK = paths_NK.repeat(num_tables, 1)
    draft_probs_BTV = None if draft_probs_GNTV is None else draft_probs_GNTV.flatten(0, 1)
    target_logits_BTV = target_logits_GNTV.flatten(0, 1)
    context = _context(prompt, ids_BK, settings_GX, num_scored=num_positions)
    is_plain = draft_probs_BTV is None and not rule.takes_best
    sizes = [PER_DRAW * num_positions] if is_plain else [num_draft_tokens, PER_DRAW]

    def choose(rows_B: Tensor, uniforms_BC: Tensor) -> Tensor:
        unused_BTP = uniforms_BC.new_full((uniforms_BC.shape[0], num_positions, PER_DRAW), 0.5)
        draws = Draws(unused_BTP[:, 1:], unused_BTP[:, 1:, 0], unused_BTP[:, 0], unused_BTP)
        if is_plain:
            draws = draws._replace(plain_BTP=uniforms_BC.unflatten(1, (num_positions, PER_DRAW)))
        else:
            accept_BK, residual_BP = uniforms_BC.split(sizes, dim=1)
            draws = draws._replace(accept_BK=accept_BK, residual_BP=residual_BP)
        draft = Draft(ids_BK[rows_B], POINT_MASS if draft_probs_BTV is None else draft_probs_BTV[rows_B])
        verdict = rule.verify(draft, rule.process(target_logits_BTV[rows_B], _rows_of(context, rows_B)), draws=draws)
        return (verdict.node_B1 * vocab_size + verdict.next_ids_B1)[:, 0]

    law_BA = choice_law(
        choose, num_rows=num_tables * num_paths, num_coordinates=sum(sizes), num_answers=num_positions * vocab_size
    )
    return law_BA.view(num_tables, num_paths, num_positions, vocab_size)


def codes_of(prefixes_NT: Tensor, vocab_size: int) -> Tensor:
    """The codes (N,) of prefixes (N, t)."""
    codes_N = torch.zeros(prefixes_NT.shape[0], dtype=torch.long)
    for ids_N in prefixes_NT.unbind(1):
        codes_N = codes_N * vocab_size + ids_N
    return codes_N


def choice_law(choose: Choice, *, num_rows: int, num_coordinates: int, num_answers: int) -> Tensor:
    """The law (B, answers) of a choice by independent uniform numbers, for every row.

    The pieces are taken to be boxes whose sides are found along lines through the corners of the unit cube: right for
    rules that compare one number with one threshold at a time, and for others the law will not come out right by luck.
    The four tokens of a table are two blocks, one at either end of the number that draws them, so that a corner lies in
    each.
    """
    edges = _edges(choose, num_rows=num_rows, num_coordinates=num_coordinates)
    grids = torch.meshgrid(*(torch.arange(edges_BM.shape[1] - 1) for edges_BM in edges), indexing="ij")
    middles, volumes_BX = [], torch.ones(num_rows, 1, dtype=torch.float64)
    for edges_BM, grid in zip(edges, grids, strict=True):
        low_BX, high_BX = edges_BM[:, grid.flatten()], edges_BM[:, grid.flatten() + 1]
        middles.append((low_BX + high_BX) / 2)
        volumes_BX = volumes_BX * (high_BX - low_BX)
    num_boxes = volumes_BX.shape[1]
    uniforms_BXC = torch.stack(middles, dim=-1).clamp_max_(LARGEST_UNIFORM)
    answers = choose(torch.arange(num_rows).repeat_interleave(num_boxes), uniforms_BXC.flatten(0, 1))
    law_BA = torch.zeros(num_rows, num_answers, dtype=torch.float64)
    return law_BA.scatter_add_(1, answers.view(num_rows, num_boxes), volumes_BX)


def _edges(choose: Choice, *, num_rows: int, num_coordinates: int) -> list[Tensor]:
    """The sorted edges (B, M) of the pieces along each coordinate, from 0 to 1, padded with ones."""
    corners = list(product((0.0, LARGEST_UNIFORM), repeat=num_coordinates))
    starts = [(c, corner) for corner in corners for c in range(num_coordinates) if corner[c] == 0.0]
    coordinate_L = torch.tensor([c for c, _ in starts]).repeat(num_rows)
    points_LC = torch.tensor([corner for _, corner in starts], dtype=torch.float64).repeat(num_rows, 1)
    rows_L = torch.arange(num_rows).repeat_interleave(len(starts))
    lines, borders = _borders(choose, rows_L, coordinate_L, points_LC)
    edges = []
    for coordinate in range(num_coordinates):
        here = coordinate_L[lines] == coordinate
        edges.append(_padded(rows=rows_L[lines[here]], borders=borders[here], num_rows=num_rows))
    return edges


def _padded(*, rows: Tensor, borders: Tensor, num_rows: int) -> Tensor:
    """Sort flat lists of rows and borders into edges (B, M): 0, the borders once each, 1, padded with ones."""
    first_B = torch.zeros(num_rows, dtype=torch.float64)
    rows = torch.cat([torch.arange(num_rows), rows, torch.arange(num_rows)])
    edges = torch.cat([first_B, borders, first_B + 1])
    order = torch.argsort(edges, stable=True)
    order = order[torch.argsort(rows[order], stable=True)]
    rows, edges = rows[order], edges[order]
    new = (rows.diff(prepend=rows[:1] - 1) > 0) | (edges.diff(prepend=edges[:1]) > _SAME_BORDER)
    rows, edges = rows[new], edges[new]
    counts_B = rows.bincount(minlength=num_rows)
    columns = torch.arange(rows.shape[0]) - (counts_B.cumsum(0) - counts_B)[rows]
    padded_BM = torch.ones(num_rows, int(counts_B.max()), dtype=torch.float64)
    padded_BM[rows, columns] = edges
    return padded_BM


def _borders(choose: Choice, rows_L: Tensor, coordinate_L: Tensor, points_LC: Tensor) -> tuple[Tensor, Tensor]:
    """Where answers change along lines in one coordinate, the others held fast: lines and borders, as flat lists."""

    def answers(lines: Tensor, at: Tensor) -> Tensor:
        uniforms_BC = points_LC[lines].scatter_(1, coordinate_L[lines, None], at[:, None])
        return choose(rows_L[lines], uniforms_BC)

    lines = torch.arange(rows_L.shape[0])
    low = torch.zeros(lines.shape[0], dtype=torch.float64)
    found_lines: list[Tensor] = []
    found_borders: list[Tensor] = []
    while True:
        high = torch.full_like(low, LARGEST_UNIFORM)
        at_low = answers(lines, low)
        changing = at_low != answers(lines, high)
        lines, low, high, at_low = lines[changing], low[changing], high[changing], at_low[changing]
        if lines.numel() == 0:
            return torch.cat([*found_lines, lines]), torch.cat([*found_borders, low])
        for _ in range(54):
            middle = (low + high) / 2
            same = answers(lines, middle) == at_low
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        found_lines.append(lines)
        found_borders.append(high)
        low = high

"""Sums that show whether texts have the target's distribution: functions of the next token, minus their expectation.

A score is a function of the next token that the text before it decides. With p the target's probabilities after that
text, f(token) - E_p f has expectation 0 and the variance that p gives, whatever was drawn before: its sum over a text
is a martingale. Each score is large on tokens that one kind of fault makes too frequent. After a rejection, scores use
the residual in place of p. This module computes the sums; `martingales` judges them.

With q the draft's probabilities and w the weight of the block before it (1 unless the rule verifies blocks), a token is
drafted and accepted with probability min(w p, q) / w, and otherwise drawn from the residual, (w p - q)+ normalised:
together p. Most faults change one of the two.

Scores do not distinguish improbable tokens: each of the most probable ones, by target and draft together, is a symbol,
in the order of their ids, and all other tokens together are the last symbol. Laws are computed over the full vocabulary
before tokens are merged, a few rows at a time, since the minimum of two sums is not the sum of the minima.

Shapes: B sequences, V vocabulary, A symbols, F scores of texts, E of residuals, G faults, N tokens looked back at,
X = 4 + G + 1 numbers of a score, C blocks of a draw,
K drafted tokens of a round whose beginning is hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.extensions.evaluate.martingales import BIASES, BLOCK, CERTAIN, FAULTS, SCORES, Role, Rounds, TextSums

NUM_NEWEST = 8
"""N: a penalty that forgets drafted tokens forgets the newest ones."""
_NUM_SYMBOLS = 128
_FLOOR = 1e-4
"""Added to probabilities before their logarithm, and the cap of ratios: no single token should decide a sum."""
_MOST_RATIO = 3.0
_TINY, _ROUNDING, _NEVER = 1e-30, 1e-6, 1e30
_MOST_AT_ONCE = 2**20
"""Probabilities of a model whose laws are formed together."""
_OF_SCORE = 4
"""How many numbers of a score come before those of its faults; its drift comes last."""
_LEAST_REST = 1e-3
"""The least mass of a residual that is used: of a smaller one, rounding is too large a share."""


class _Laws(NamedTuple):
    """Probabilities of the symbols: sums over their tokens.

    Attributes:
        ids_BA: ids of all symbols but the last.
        accepted_BA: probabilities that a token is drafted and accepted; their sum is below 1.
        rest_BA: probabilities of a token after a rejection.
        stated_BA: probabilities of a token that the maker of the texts states; the target's where it states none.
        of_texts_BGA, residuals_BEA: probabilities of a token under each of `FAULTS`, and of a token after a rejection
            under each of `RESIDUALS`.
    """

    ids_BA: Tensor
    target_BA: Tensor
    draft_BA: Tensor
    accepted_BA: Tensor
    rest_BA: Tensor
    stated_BA: Tensor
    of_texts_BGA: Tensor
    residuals_BEA: Tensor


class LawSums:
    """The sums of a batch of texts, which are given token by token."""

    def __init__(self, batch_size: int, device: torch.device, rounds: Rounds) -> None:
        self._rounds = rounds
        self._drift_B1 = torch.zeros(batch_size, 1, device=device, dtype=torch.float64)
        self._weight_B1 = torch.ones(batch_size, 1, device=device)
        self._depth_B1 = torch.zeros(batch_size, 1, device=device, dtype=torch.int64)
        self._chances_BK = torch.zeros(batch_size, rounds.longest + 1, device=device, dtype=torch.float64)
        self._chances_BK[:, 0] = 1.0
        self._sums_BXF = torch.zeros(
            batch_size, _OF_SCORE + len(FAULTS) + 1, len(SCORES), device=device, dtype=torch.float64
        )
        is_known, is_chain = rounds.num_known > 0, not rounds.widths
        has_siblings = is_known and rounds.rule != CERTAIN and rounds.widths[:1] > (1,)
        of_rounds = [is_known and is_chain and rounds.rule in rules for rules in FAULTS.values()]
        of_rounds[-3:] = [has_siblings, rounds.penalizes, is_known]
        self._of_rounds_G = torch.tensor(of_rounds, device=device)

    def add(
        self,
        next_B1: Tensor,
        target_BV: Tensor,
        draft_BV: Tensor,
        *,
        newest_BN: Tensor,
        roles_B: Tensor,
        forgetful_BV: Tensor | None = None,
        stated_BV: Tensor | None = None,
    ) -> None:
        """Add a token of each row, given both models' probabilities at its position.

        A draft without probabilities has 1 at the token that it proposes. `newest_BN` are the tokens before, and
        `roles_B` says by its `Role` how each token came about; unused tokens add nothing. `forgetful_BV` are the
        target's probabilities if penalties ignored the drafted tokens of the round, and `stated_BV` those that the
        maker of the texts states.
        """
        roles_B1, num_rows = roles_B[:, None], max(1, _MOST_AT_ONCE // target_BV.shape[1])
        others = (target_BV if one_BV is None else one_BV for one_BV in (forgetful_BV, stated_BV))
        given = target_BV, draft_BV, *others, self._weight_B1
        parts = zip(*(of_all.split(num_rows) for of_all in given), strict=True)
        laws = _Laws(*map(torch.cat, zip(*(self._laws(*part) for part in parts), strict=True)))
        ids_BA, is_drafted_B1 = laws.ids_BA, (roles_B1 == Role.accepted) | (roles_B1 == Role.resampled)
        counts_BG, moved_BG = self._having(roles_B1, is_drafted_B1)
        scores_BFA = _scores(
            laws,
            is_newest_BA=(ids_BA[..., None] == newest_BN[:, None]).any(-1),
            drift_B1=self._drift_B1,
            is_first_B1=is_drafted_B1 & (self._depth_B1 == 0),
            counts_BG=counts_BG,
        )
        ratios_BEA = _ratios(laws.residuals_BEA, laws.rest_BA)
        # The first one that fits, and the last fits all tokens.
        symbol_B1 = pad(ids_BA == next_B1, (0, 1), value=True).int().argmax(1, keepdim=True)
        is_used_B1 = roles_B1 != Role.unused
        is_rest_B1 = (roles_B1 == Role.resampled) & (1 - laws.accepted_BA.sum(1, keepdim=True) > _LEAST_REST)
        of_texts_BXF = _moments(scores_BFA, laws.target_BA, laws.of_texts_BGA, symbol_B1) * is_used_B1[..., None]
        of_rests_BXE = _moments(ratios_BEA, laws.rest_BA, laws.residuals_BEA, symbol_B1) * is_rest_B1[..., None]
        drifts_BF1 = scores_BFA @ (laws.stated_BA - laws.target_BA)[..., None] * is_used_B1[..., None]
        of_texts_BXF = torch.cat([of_texts_BXF, drifts_BF1.transpose(1, 2)], dim=1)
        of_rests_BXE = pad(of_rests_BXE, (0, 0, 0, of_texts_BXF.shape[1] - of_rests_BXE.shape[1]))
        new_BXF = torch.cat([of_texts_BXF, of_rests_BXE * self._rounds.sees_rejections], dim=2)
        new_BXF[:, _OF_SCORE:-1] *= moved_BG[..., None]
        reaches_BF = torch.maximum(self._sums_BXF[:, 2], new_BXF[:, 2])
        self._sums_BXF += new_BXF
        self._sums_BXF[:, 2] = reaches_BF
        self._drift_B1 += (_places(laws.target_BA).gather(1, symbol_B1) - 0.5) * is_used_B1

        is_accepted_B1 = roles_B1 == Role.accepted
        self._depth_B1 = (self._depth_B1 + 1) * is_accepted_B1
        if self._rounds.rule == BLOCK:
            grown_B1 = self._weight_B1 * target_BV.gather(1, next_B1) / draft_BV.gather(1, next_B1).clamp_min(_TINY)
            self._weight_B1 = torch.where(is_accepted_B1, grown_B1.clamp(_ROUNDING, 1.0), 1.0)
        accepted_B1 = laws.accepted_BA.gather(1, symbol_B1) / laws.target_BA.gather(1, symbol_B1).clamp_min(_TINY)
        on_BK = self._chances_BK[:, :-1] * accepted_B1.clamp(0, 1)
        self._chances_BK = torch.cat([1 - on_BK.sum(1, keepdim=True), on_BK], dim=1)

    def of_texts(self) -> list[TextSums]:
        """The sums of each row."""
        return [
            TextSums._make([*numbers[:_OF_SCORE], numbers[_OF_SCORE:-1], numbers[-1]])
            for numbers in self._sums_BXF.tolist()
        ]

    def _having(self, roles_B1: Tensor, is_drafted_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether these tokens can have each fault, and the chance of those whose law is known, each (B, G)."""
        is_bonus_B1, is_first_B1 = roles_B1 == Role.bonus, self._depth_B1 == 0
        is_known_B1 = self._depth_B1 < self._rounds.num_known
        is_later_B1 = (is_drafted_B1 | is_bonus_B1) & ~is_first_B1
        num_of_drafts = len(FAULTS) - 2
        can_BG = torch.cat([is_drafted_B1.expand(-1, num_of_drafts), is_later_B1, is_bonus_B1], dim=1)
        # Of later tokens of a tree's path the text does not say which siblings were rejected before them.
        known = [is_known_B1.expand(-1, num_of_drafts - 1), is_first_B1, is_later_B1, is_known_B1]
        can_BG, moved_BG = can_BG | ~self._of_rounds_G, can_BG & torch.cat(known, dim=1) & self._of_rounds_G
        # The last place of a round has the bonus token, the others drafted ones; penalties that forget are not judged.
        ends_B1, is_hidden_B1 = self._chances_BK[:, -1:], roles_B1 == Role.hidden
        hidden = [(1 - ends_B1).expand(-1, num_of_drafts), torch.zeros_like(ends_B1), ends_B1]
        hidden_BG = torch.cat(hidden, dim=1) * self._of_rounds_G
        return can_BG | is_hidden_B1, torch.where(is_hidden_B1, hidden_BG, moved_BG.double())

    def _laws(
        self, target_BV: Tensor, draft_BV: Tensor, forgetful_BV: Tensor, stated_BV: Tensor, weight_B1: Tensor
    ) -> _Laws:
        """The laws of the next token of some rows."""
        num_ids = min(_NUM_SYMBOLS, target_BV.shape[1]) - 1
        ids_BA = (target_BV + draft_BV).topk(num_ids).indices.sort().values
        weighted_BV = target_BV * weight_B1
        accepted_BV = torch.minimum(weighted_BV, draft_BV)
        rest_BV = weighted_BV - accepted_BV
        has_rest_B1 = rest_BV.sum(1, keepdim=True) > _TINY
        target_BA = _symbols(target_BV, ids_BA)
        target_BA = target_BA / target_BA.sum(1, keepdim=True)

        def residual(rest_BV: Tensor) -> Tensor:
            whole_BA = _symbols(rest_BV, ids_BA)
            return torch.where(has_rest_B1, whole_BA / whole_BA.sum(1, keepdim=True).clamp_min(_TINY), target_BA)

        def text(accepted_BV: Tensor, residual_BA: Tensor) -> Tensor:
            accepted_BA = _symbols(accepted_BV, ids_BA) / weight_B1
            return accepted_BA + (1 - accepted_BA.sum(1, keepdim=True)).clamp_min(0) * residual_BA

        stated_BA = _symbols(stated_BV, ids_BA)
        rest_BA = residual(rest_BV)
        residuals = [
            target_BA,
            residual((target_BV - draft_BV).clamp_min(0)) if self._rounds.rule == BLOCK else rest_BA,
            residual(_with_drafts_uniforms(rest_BV, draft_BV, draft_BV - accepted_BV)),
            residual(_with_drafts_race(rest_BV, draft_BV)),
        ]
        of_texts = [text(accepted_BV, residual_BA) for residual_BA in residuals]
        of_texts += [text(torch.minimum(draft_BV, target_BV / factor) * weight_B1, rest_BA) for factor in BIASES]
        rounded_BV = draft_BV.bfloat16().to(draft_BV.dtype)
        rounded_BV = rounded_BV / rounded_BV.sum(1, keepdim=True)
        of_texts.append(text(accepted_BV * rounded_BV / draft_BV.clamp_min(_TINY), rest_BA))
        of_sibling_BV = _with_rejected_sibling(accepted_BV, rest_BV, draft_BV)
        of_texts += [_symbols(others_BV, ids_BA) for others_BV in (of_sibling_BV, forgetful_BV, draft_BV)]
        return _Laws(
            ids_BA,
            target_BA,
            of_texts[-1],
            _symbols(accepted_BV, ids_BA) / weight_B1,
            rest_BA,
            stated_BA / stated_BA.sum(1, keepdim=True),
            torch.stack(of_texts, dim=1),
            torch.stack(residuals, dim=1),
        )


def _symbols(weights_BV: Tensor, ids_BA: Tensor) -> Tensor:
    """Reduce weights to symbols, (B, A) in fp64; if the last one is only rounding, it is 0."""
    weights_BA = weights_BV.gather(1, ids_BA).double()
    sums_B1 = weights_BV.sum(1, keepdim=True, dtype=torch.float64)
    others_B1 = sums_B1 - weights_BA.sum(1, keepdim=True)
    return torch.cat([weights_BA, torch.where(others_B1 > _ROUNDING * sums_B1, others_B1, 0.0)], dim=1)


def _moments(scores_BFA: Tensor, law_BA: Tensor, faulty_BGA: Tensor, symbol_B1: Tensor) -> Tensor:
    """Return the numbers (B, X, F) of the scores of one token, under its law and under each faulty law."""
    scores_BFA = scores_BFA - scores_BFA @ law_BA[..., None]
    values_BF1 = scores_BFA.gather(2, symbol_B1[:, None].expand(-1, scores_BFA.shape[1], -1))
    variances_BF1 = scores_BFA.square() @ law_BA[..., None]
    reaches_BF1 = (scores_BFA * (law_BA > 0)[:, None]).abs().amax(-1, keepdim=True)
    highest_BF1, lowest_BF1 = scores_BFA.amax(-1, keepdim=True), scores_BFA.amin(-1, keepdim=True)
    shifts_BFG = scores_BFA @ faulty_BGA.transpose(1, 2)
    numbers = [values_BF1, variances_BF1, reaches_BF1, highest_BF1 - lowest_BF1, shifts_BFG]
    return torch.cat(numbers, dim=2).transpose(1, 2)


def _with_drafts_uniforms(rest_BV: Tensor, draft_BV: Tensor, rejected_BV: Tensor) -> Tensor:
    """Return the residual under the fault that its draw reuses the uniform that picked the rejected token's block.

    See `draw`. The blocks of the tokens that may be rejected tell where that uniform is.
    """
    vocab_size = rest_BV.shape[1]
    size = tokens_of_a_block(vocab_size)
    rest_BC, draft_BC, rejected_BC = (
        pad(given_BV, (0, -vocab_size % size)).unflatten(1, (-1, size)).sum(-1, dtype=torch.float64)
        for given_BV in (rest_BV, draft_BV, rejected_BV)
    )
    starts_BC, ends_BC = draft_BC.cumsum(1) - draft_BC, rest_BC.cumsum(1)
    ends_BC = ends_BC / ends_BC[:, -1:].clamp_min(_TINY)
    block_BC = torch.searchsorted(draft_BC.cumsum(1), ends_BC).clamp_max(draft_BC.shape[1] - 1)
    share_BC = (ends_BC - starts_BC.gather(1, block_BC)) / draft_BC.gather(1, block_BC).clamp_min(_TINY)
    before_BC = (rejected_BC.cumsum(1) - rejected_BC).gather(1, block_BC)
    mass_BC = before_BC + share_BC.clamp(0, 1) * rejected_BC.gather(1, block_BC)
    masses_BC = torch.diff(pad(mass_BC, (1, 0)), dim=1).clamp_min(0)
    ratios_BC: Tensor = masses_BC / rest_BC.clamp_min(_TINY)
    return rest_BV * ratios_BC.repeat_interleave(size, dim=1)[:, :vocab_size]


def _with_drafts_race(rest_BV: Tensor, draft_BV: Tensor) -> Tensor:
    """Return the residual under the fault that each token's race (exponential, or Gumbel noise) continues the draft's.

    The draft's race ends after a time T, of exponential law, whoever wins. A token of draft q and residual r starts a
    race of speed r late by T q / r. With G(v) the integral of the speeds of races that have started, and T integrated
    out, the race is open at v with probability 1 / (1 + G(v)).
    """
    speeds_BV = rest_BV.double() / rest_BV.sum(1, keepdim=True, dtype=torch.float64).clamp_min(_TINY)
    starts_BV, order_BV = (draft_BV / speeds_BV.clamp_min(_TINY)).clamp_max(_NEVER).sort(dim=1)
    speeds_BV = speeds_BV.gather(1, order_BV)
    whole_BV = speeds_BV.cumsum(1).clamp_min(_TINY)
    open_BV = 1 / (1 + pad((whole_BV[:, :-1] * starts_BV.diff(dim=1)).cumsum(1), (1, 0)))
    won_BV = (open_BV - pad(open_BV[:, 1:], (0, 1))) / whole_BV
    return torch.zeros_like(won_BV).scatter(1, order_BV, speeds_BV * won_BV.flip(1).cumsum(1).flip(1))


def _with_rejected_sibling(accepted_BV: Tensor, rest_BV: Tensor, draft_BV: Tensor) -> Tensor:
    """Return the law at a node under the fault that its second child is verified as if it could equal the first.

    The second child is drawn from q without the rejected r, and accepted with min(1, rest / q) in place of
    min(1, rest (1 - q(r)) / q); further children keep the law of what is left.
    """
    rest_BV = rest_BV.double() / rest_BV.sum(1, keepdim=True, dtype=torch.float64).clamp_min(_TINY)
    rejected_BV = (draft_BV - accepted_BV).double()
    chance_B1 = (rejected_BV / (1 - draft_BV).clamp_min(_ROUNDING)).sum(1, keepdim=True)
    second_BV = torch.minimum(draft_BV, rest_BV)
    left_BV = rest_BV - second_BV
    law_BV = accepted_BV + chance_B1 * second_BV
    missing_B1 = (1 - law_BV.sum(1, keepdim=True)).clamp_min(0)
    return law_BV + missing_B1 * left_BV / left_BV.sum(1, keepdim=True).clamp_min(_TINY)


def _ratios(laws_BGA: Tensor, true_BA: Tensor) -> Tensor:
    return (laws_BGA / true_BA[:, None].clamp_min(_TINY)).clamp_max(_MOST_RATIO)


def _scores(laws: _Laws, *, is_newest_BA: Tensor, drift_B1: Tensor, is_first_B1: Tensor, counts_BG: Tensor) -> Tensor:
    """Return all scores of texts (B, F, A), in the order of `TEXT_SCORES`."""
    target_BA, draft_BA = laws.target_BA, laws.draft_BA
    acceptance_BA = (target_BA / draft_BA.clamp_min(_TINY)).clamp_max(1.0)
    log_target_BA, log_draft_BA = (target_BA + _FLOOR).log(), (draft_BA + _FLOOR).log()
    is_newest_BA = pad(is_newest_BA.to(target_BA.dtype), (0, 1))
    places_BA = _places(target_BA)
    others = [
        log_target_BA - log_draft_BA,
        log_draft_BA,
        acceptance_BA,
        -log_target_BA,
        is_newest_BA,
        places_BA,
        places_BA * drift_B1.clamp(-1, 1),
        places_BA * is_first_B1,
    ]
    of_faults_BGA = _ratios(laws.of_texts_BGA, target_BA) * counts_BG[..., None]
    return torch.cat([of_faults_BGA, torch.stack(others, dim=1)], dim=1)


def _places(target_BA: Tensor) -> Tensor:
    """Return the middle of each symbol's interval in the target's cumulative distribution; the mean is 1 / 2."""
    return target_BA.cumsum(-1) - target_BA / 2

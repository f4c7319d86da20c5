"""Sums that show whether texts have the target's distribution: functions of the next token, minus their expectation.

A score is a function of the next token that the text before it decides. With p the target's probabilities after that
text, f(token) - E_p f has expectation 0 and the variance that p gives, whatever was drawn before: its sum over a text
is a martingale. Each score is large on tokens that one kind of fault makes too frequent. After a rejection, the
residual takes the place of p. Texts are only read here; `evaluation.martingales` judges the sums.

With q the draft's probabilities and w the weight of the block before it (1 unless the rule verifies blocks), a token is
drafted and accepted with probability min(w p, q) / w, and otherwise drawn from the residual, (w p - q)+ normalised:
together p. Most faults change one of the two.

Scores do not distinguish improbable tokens: the most probable ones, by target and draft together, are symbols of their
own, in the order of their ids, and all others are the last symbol.

Shapes: B sequences, V vocabulary, A symbols, F scores of texts, E of residuals, G faults, N tokens looked back at,
X = 3 + G numbers of a score, D levels of a tree, C blocks of a draw.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.evaluation.martingales import BIASES, BLOCK, FAULTS, RESIDUALS, SCORES, Role, Rounds, TextSums
from llama_ssp.settings.rules import DEFAULT

NUM_NEWEST = 8
"""N: a penalty that forgets drafted tokens forgets the newest ones."""
_NUM_SYMBOLS = 128
_FLOOR = 1e-4
"""Added to probabilities before their logarithm, and the cap of ratios: no single token should decide a sum."""
_MOST_RATIO = 3.0
_TINY, _ROUNDING, _NEVER = 1e-30, 1e-6, 1e30
_LEAST_REST = 1e-3
"""Mass of a residual; of a smaller one rounding is too large a share."""


class _Laws(NamedTuple):
    """Probabilities of the symbols.

    Attributes:
        accepted_BA: of a token that is drafted and accepted, times the weight; its sum is below 1.
        rest_BA: of a token after a rejection.
    """

    target_BA: Tensor
    draft_BA: Tensor
    accepted_BA: Tensor
    rest_BA: Tensor


class LawSums:
    """The sums of a batch of texts, which are given token by token."""

    def __init__(self, batch_size: int, device: torch.device, rounds: Rounds) -> None:
        self._rounds = rounds
        self._drift_B1 = torch.zeros(batch_size, 1, device=device, dtype=torch.float64)
        self._weight_B1 = torch.ones(batch_size, 1, device=device)
        self._depth_B1 = torch.zeros(batch_size, 1, device=device, dtype=torch.int64)
        self._sums_BXF = torch.zeros(batch_size, 3 + len(FAULTS), len(SCORES), device=device, dtype=torch.float64)
        self._of_chains_G = torch.tensor([rounds.rule in rules for rules in FAULTS.values()], device=device)
        self._widths_D = torch.tensor([*rounds.widths, 1], device=device)

    def add(
        self, next_B1: Tensor, target_BV: Tensor, draft_BV: Tensor, *, newest_BN: Tensor, roles_B: Tensor,
        forgetful_BV: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add a token of each row, from both models' probabilities of all that could stand there.

        A draft without probabilities has 1 at the token that it proposes. `newest_BN` are the tokens before, and
        `roles_B` says how each token came about, a `Role`; an unused one adds nothing. `forgetful_BV` are the target's
        probabilities if penalties do not see the drafted tokens of the round.
        """
        ids_BA, roles_B1 = _ids(target_BV, draft_BV), roles_B[:, None]
        laws, of_texts_BGA, residuals_BGA = self._laws(ids_BA, target_BV, draft_BV, forgetful_BV)
        is_newest_BA = (ids_BA[..., None] == newest_BN[:, None]).any(-1)
        is_drafted_B1 = (roles_B1 == Role.accepted) | (roles_B1 == Role.resampled)
        scores_BFA = _scores(
            laws, of_texts_BGA, is_newest_BA=is_newest_BA, drift_B1=self._drift_B1,
            is_opening_B1=is_drafted_B1 & (self._depth_B1 == 0),
        )  # fmt: skip
        ratios_BEA = _ratios(residuals_BGA[:, : len(RESIDUALS)], laws.rest_BA)
        # The last symbol where no id is that of the token.
        numbers_A = torch.arange(1, ids_BA.shape[1] + 1, device=ids_BA.device)
        symbol_B1 = ((ids_BA == next_B1) * numbers_A).sum(1, keepdim=True) - 1
        symbol_B1 = symbol_B1 % laws.target_BA.shape[1]

        is_used_B1 = roles_B1 != Role.unused
        is_rest_B1 = (roles_B1 == Role.resampled) & (1 - laws.accepted_BA.sum(1, keepdim=True) > _LEAST_REST)
        of_texts_BXF = _moments(scores_BFA, laws.target_BA, of_texts_BGA, symbol_B1) * is_used_B1[..., None]
        of_rests_BXE = _moments(ratios_BEA, laws.rest_BA, residuals_BGA, symbol_B1) * is_rest_B1[..., None]
        new_BXF = torch.cat([of_texts_BXF, of_rests_BXE * self._rounds.sees_rejections], dim=2)
        new_BXF[:, 3:] *= self._can_have(roles_B1, is_drafted_B1, forgets=forgetful_BV is not None)[..., None]
        reaches_BF = torch.maximum(self._sums_BXF[:, 2], new_BXF[:, 2])
        self._sums_BXF += new_BXF
        self._sums_BXF[:, 2] = reaches_BF
        self._drift_B1 += (_places(laws.target_BA).gather(1, symbol_B1) - 0.5) * is_used_B1

        is_accepted_B1 = roles_B1 == Role.accepted
        self._depth_B1 = (self._depth_B1 + 1) * is_accepted_B1
        if self._rounds.rule == BLOCK:
            grown_B1 = self._weight_B1 * target_BV.gather(1, next_B1) / draft_BV.gather(1, next_B1).clamp_min(_TINY)
            self._weight_B1 = torch.where(is_accepted_B1, grown_B1.clamp(_ROUNDING, 1.0), 1.0)

    def of_texts(self) -> list[TextSums]:
        """The sums of each row."""
        return [
            TextSums(values=values, variances=variances, reaches=reaches, shifts=shifts)
            for values, variances, reaches, *shifts in self._sums_BXF.tolist()
        ]

    def _can_have(self, roles_B1: Tensor, is_drafted_B1: Tensor, *, forgets: bool) -> Tensor:
        """Whether these tokens can have each fault, (B, G)."""
        is_chain_B1 = self._widths_D[self._depth_B1.clamp_max(len(self._rounds.widths))] == 1
        of_others = [
            is_drafted_B1 & ~is_chain_B1 & (self._rounds.rule == DEFAULT),
            (is_drafted_B1 | (roles_B1 == Role.bonus)) & (self._depth_B1 > 0) & forgets,
            roles_B1 == Role.bonus,
        ]
        num_of_chains = len(FAULTS) - len(of_others)
        return torch.cat([is_drafted_B1 & is_chain_B1 & self._of_chains_G[:num_of_chains], *of_others], dim=1)

    def _laws(
        self, ids_BA: Tensor, target_BV: Tensor, draft_BV: Tensor, forgetful_BV: Tensor | None
    ) -> tuple[_Laws, Tensor, Tensor]:
        """The laws of the next token: the true ones, and under each of `FAULTS` that of texts and of residuals."""
        weighted_BV = target_BV * self._weight_B1
        accepted_BV = torch.minimum(weighted_BV, draft_BV)
        rest_BV = weighted_BV - accepted_BV
        target_BA, draft_BA, accepted_BA = (
            _symbols(probs_BV, ids_BA) for probs_BV in (target_BV, draft_BV, accepted_BV / self._weight_B1)
        )
        target_BA = target_BA / target_BA.sum(1, keepdim=True)
        missing_B1 = 1 - accepted_BA.sum(1, keepdim=True)
        has_rest_B1 = rest_BV.sum(1, keepdim=True) > _TINY

        def residual(rest_BV: Tensor) -> Tensor:
            whole_BA = _symbols(rest_BV, ids_BA)
            return torch.where(has_rest_B1, whole_BA / whole_BA.sum(1, keepdim=True).clamp_min(_TINY), target_BA)

        rest_BA = residual(rest_BV)
        laws = _Laws(target_BA, draft_BA, accepted_BA, rest_BA)
        forgets_BA = rest_BA if self._rounds.rule != BLOCK else residual((target_BV - draft_BV).clamp_min(0))
        shares_BA = residual(_with_drafts_uniforms(rest_BV, draft_BV, draft_BV - accepted_BV))
        residuals = [target_BA, forgets_BA, shares_BA, _with_drafts_race(laws)]
        rounded_BV = draft_BV.bfloat16().to(draft_BV.dtype)
        rounded_BV = rounded_BV / rounded_BV.sum(1, keepdim=True)
        in_bf16_BA = _symbols(accepted_BV * rounded_BV / draft_BV.clamp_min(_TINY), ids_BA)
        of_texts = [accepted_BA + missing_B1 * residual_BA for residual_BA in residuals]
        accepted = [*(torch.minimum(draft_BA, target_BA / factor) for factor in BIASES), in_bf16_BA]
        of_texts += [accept_BA + (1 - accept_BA.sum(1, keepdim=True)) * rest_BA for accept_BA in accepted]
        of_texts.append(_with_rejected_sibling(laws))
        of_texts += [target_BA if forgetful_BV is None else _symbols(forgetful_BV, ids_BA), draft_BA]
        residuals += [rest_BA] * (len(FAULTS) - len(RESIDUALS))
        return laws, torch.stack(of_texts, dim=1), torch.stack(residuals, dim=1)


def _ids(target_BV: Tensor, draft_BV: Tensor) -> Tensor:
    """The ids (B, A - 1) of all symbols but the last."""
    num_ids = min(_NUM_SYMBOLS, target_BV.shape[1]) - 1
    return (target_BV + draft_BV).topk(num_ids).indices.sort().values


def _symbols(weights_BV: Tensor, ids_BA: Tensor) -> Tensor:
    """Reduce weights to symbols, (B, A) in fp64; what rounding leaves of the last one is 0."""
    weights_BA = weights_BV.gather(1, ids_BA).double()
    sums_B1 = weights_BV.sum(1, keepdim=True, dtype=torch.float64)
    others_B1 = sums_B1 - weights_BA.sum(1, keepdim=True)
    return torch.cat([weights_BA, torch.where(others_B1 > _ROUNDING * sums_B1, others_B1, 0.0)], dim=1)


def _moments(scores_BFA: Tensor, law_BA: Tensor, faulty_BGA: Tensor, symbol_B1: Tensor) -> Tensor:
    """The numbers (B, X, F) of scores of one token, whose law is the first, or one of the faulty ones."""
    scores_BFA = scores_BFA - scores_BFA @ law_BA[..., None]
    values_BF1 = scores_BFA.gather(2, symbol_B1[:, None].expand(-1, scores_BFA.shape[1], -1))
    variances_BF1 = scores_BFA.square() @ law_BA[..., None]
    reaches_BF1 = (scores_BFA * (law_BA > 0)[:, None]).abs().amax(-1, keepdim=True)
    shifts_BFG = scores_BFA @ faulty_BGA.transpose(1, 2)
    return torch.cat([values_BF1, variances_BF1, reaches_BF1, shifts_BFG], dim=2).transpose(1, 2)


def _with_drafts_uniforms(rest_BV: Tensor, draft_BV: Tensor, rejected_BV: Tensor) -> Tensor:
    """The residual if the number that picks its block (see `draw`) is the one that has picked the rejected token's.

    Where that number is, follows from the blocks of the tokens that are rejected.
    """
    vocab_size = rest_BV.shape[1]
    size = tokens_of_a_block(vocab_size)
    missing = -vocab_size % size
    rest_BC, draft_BC, rejected_BC = (
        pad(given_BV, (0, missing)).unflatten(1, (-1, size)).sum(-1, dtype=torch.float64)
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


def _with_drafts_race(laws: _Laws) -> Tensor:
    """The residual if each token's race (exponential, or Gumbel noise) goes on where the draft's has ended.

    The draft's race ends after a time T, of exponential law, whoever wins. A token of draft q and residual r starts a
    race of speed r late by T q / r. With G(v) the integral of the speeds of those that have started, and T integrated
    out, the race is open at v with probability 1 / (1 + G(v)).
    """
    starts_BA, order_BA = (laws.draft_BA / laws.rest_BA.clamp_min(_TINY)).clamp_max(_NEVER).sort(dim=1)
    speeds_BA = laws.rest_BA.gather(1, order_BA)
    whole_BA = speeds_BA.cumsum(1).clamp_min(_TINY)
    passed_BA = pad((whole_BA[:, :-1] * starts_BA.diff(dim=1)).cumsum(1), (1, 0))
    open_BA = 1 / (1 + passed_BA)
    won_BA = (open_BA - pad(open_BA[:, 1:], (0, 1))) / whole_BA
    law_BA = speeds_BA * won_BA.flip(1).cumsum(1).flip(1)
    law_BA = torch.zeros_like(law_BA).scatter(1, order_BA, law_BA)
    return law_BA / law_BA.sum(1, keepdim=True).clamp_min(_TINY)


def _with_rejected_sibling(laws: _Laws) -> Tensor:
    """The law at a node whose second child is verified as if the draft could draw the first one again.

    The second child is drawn from q without the rejected r, and accepted with min(1, rest / q) in place of
    min(1, rest (1 - q(r)) / q); further children keep the law of what is left.
    """
    rejected_BA = (laws.draft_BA - laws.accepted_BA).clamp_min(0)
    chance_B1 = (rejected_BA / (1 - laws.draft_BA).clamp_min(_ROUNDING)).sum(1, keepdim=True)
    second_BA = torch.minimum(laws.draft_BA, laws.rest_BA)
    left_BA = laws.rest_BA - second_BA
    left_BA = left_BA / left_BA.sum(1, keepdim=True).clamp_min(_TINY)
    law_BA = laws.accepted_BA + chance_B1 * second_BA
    return law_BA + (1 - law_BA.sum(1, keepdim=True)).clamp_min(0) * left_BA


def _ratios(laws_BGA: Tensor, true_BA: Tensor) -> Tensor:
    return (laws_BGA / true_BA[:, None].clamp_min(_TINY)).clamp_max(_MOST_RATIO)


def _scores(
    laws: _Laws, faulty_BGA: Tensor, *, is_newest_BA: Tensor, drift_B1: Tensor, is_opening_B1: Tensor
) -> Tensor:
    """All scores of texts (B, F, A), in the order of `TEXT_SCORES`."""
    target_BA, draft_BA = laws.target_BA, laws.draft_BA
    acceptance_BA = (target_BA / draft_BA.clamp_min(_TINY)).clamp_max(1.0)
    log_target_BA, log_draft_BA = (target_BA + _FLOOR).log(), (draft_BA + _FLOOR).log()
    is_newest_BA = pad(is_newest_BA.to(target_BA.dtype), (0, 1))
    places_BA = _places(target_BA)
    others = [
        log_target_BA - log_draft_BA, log_draft_BA, acceptance_BA, -log_target_BA, is_newest_BA, places_BA,
        places_BA * drift_B1.clamp(-1, 1), places_BA * is_opening_B1,
    ]  # fmt: skip
    return torch.cat([_ratios(faulty_BGA, target_BA), torch.stack(others, dim=1)], dim=1)


def _places(target_BA: Tensor) -> Tensor:
    """The middle of each symbol's share of the target's cumulative distribution; 1 / 2 on average."""
    return target_BA.cumsum(-1) - target_BA / 2

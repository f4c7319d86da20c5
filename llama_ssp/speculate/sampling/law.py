"""Sums that show whether texts have the target's distribution: functions of the next token, minus their expectation.

A score is a function of the next token that the text before it decides. With p the target's probabilities after that
text, f(token) - E_p f has expectation 0 and the variance that p gives, whatever was drawn before: its sum over a text
is a martingale. Each score is large on tokens that one kind of fault makes too frequent. Texts are only read here;
`evaluation.martingales` judges the sums.

Scores do not tell improbable tokens apart: the most probable ones, by target and draft together, are symbols of their
own, in the order of their ids, and all others are the last symbol.

Shapes: B sequences, V vocabulary, A symbols, F scores, G faults, N tokens looked back at, X = 3 + G numbers of a score,
R = 2 roles.
"""

import torch
from torch import Tensor

from llama_ssp.evaluation.martingales import BIASES, FAULTS, SCORES, Role, TextSums

NUM_NEWEST = 8
"""N: a penalty that forgets drafted tokens forgets the newest ones."""
_NUM_SYMBOLS = 128
_FLOOR = 1e-4
"""Added to probabilities before their logarithm, and the cap of ratios: no single token should decide a sum."""
_MOST_RATIO = 3.0
_TINY, _ROUNDING = 1e-30, 1e-6


class LawSums:
    """The sums of a batch of texts, which are given token by token."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._drift_B1 = torch.zeros(batch_size, 1, device=device, dtype=torch.float64)
        self._sums_BXF = torch.zeros(batch_size, 3 + len(FAULTS), len(SCORES), device=device, dtype=torch.float64)

    def add(self, next_B1: Tensor, target_BV: Tensor, draft_BV: Tensor, *, newest_BN: Tensor, roles_B: Tensor) -> None:
        """Add a token of each row, from both models' probabilities of all that could stand there.

        A draft without probabilities has 1 at the token that it proposes. `newest_BN` are the tokens before, and
        `roles_B` says how each token came about, a `Role`; an unused one adds nothing.
        """
        ids_BA, target_BA, draft_BA = _symbols(target_BV, draft_BV)
        # The last symbol where no id is that of the token.
        symbol_B1 = ((ids_BA == next_B1) * torch.arange(1, ids_BA.shape[1] + 1, device=ids_BA.device)).sum(
            1, keepdim=True
        )
        symbol_B1 = (symbol_B1 - 1) % target_BA.shape[1]
        laws_BGA, roles_GR = _faulty_laws(target_BA, draft_BA)
        is_newest_BA = (ids_BA[..., None] == newest_BN[:, None]).any(-1)
        scores_BFA = _scores(
            target_BA, draft_BA, laws_BGA, is_newest_BA=is_newest_BA, drift_B1=self._drift_B1,
            is_opening_B1=(roles_B == Role.opening)[:, None],
        )  # fmt: skip
        scores_BFA = scores_BFA - scores_BFA @ target_BA[..., None]

        values_B1F = scores_BFA.gather(2, symbol_B1[:, None].expand(-1, len(SCORES), -1)).transpose(1, 2)
        variances_B1F = (scores_BFA.square() @ target_BA[..., None]).transpose(1, 2)
        reaches_B1F = (scores_BFA * (target_BA > 0)[:, None]).abs().amax(-1)[:, None]
        shifts_BGF = (laws_BGA @ scores_BFA.transpose(1, 2)) * (roles_B[:, None, None] == roles_GR).any(
            -1, keepdim=True
        )
        is_used_B11 = (roles_B != Role.unused)[:, None, None]
        new_BXF = torch.cat([values_B1F, variances_B1F, reaches_B1F, shifts_BGF], dim=1) * is_used_B11
        reaches_BF = torch.maximum(self._sums_BXF[:, 2], new_BXF[:, 2])
        self._sums_BXF += new_BXF
        self._sums_BXF[:, 2] = reaches_BF
        places_BA = _places(target_BA)
        self._drift_B1 += (places_BA.gather(1, symbol_B1) - 0.5) * is_used_B11[..., 0]

    def of_texts(self) -> list[TextSums]:
        """The sums of each row."""
        return [
            TextSums(values=values, variances=variances, reaches=reaches, shifts=shifts)
            for values, variances, reaches, *shifts in self._sums_BXF.tolist()
        ]


def _symbols(target_BV: Tensor, draft_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The ids (B, A - 1) of all symbols but the last, and both models' probabilities of the symbols."""
    num_ids = min(_NUM_SYMBOLS, target_BV.shape[1]) - 1
    ids_BA = (target_BV + draft_BV).topk(num_ids).indices.sort().values
    target_BA, draft_BA = (probs_BV.gather(1, ids_BA).double() for probs_BV in (target_BV, draft_BV))
    return ids_BA, _with_others(target_BA), _with_others(draft_BA)


def _with_others(probs_BA: Tensor) -> Tensor:
    """Append the probability of all other tokens; what rounding leaves of it is 0."""
    others_B1 = 1 - probs_BA.sum(-1, keepdim=True)
    probs_BA = torch.cat([probs_BA, torch.where(others_B1 > _ROUNDING, others_B1, 0.0)], dim=1)
    return probs_BA / probs_BA.sum(-1, keepdim=True)


def _faulty_laws(target_BA: Tensor, draft_BA: Tensor) -> tuple[Tensor, Tensor]:
    """The next token's distribution under each of `FAULTS` (B, G, A), and the roles of tokens that have it (G, R)."""
    rest_BA = (target_BA - draft_BA).clamp_min(0)
    rest_BA = torch.where(rest_BA.sum(-1, keepdim=True) > 0, rest_BA, target_BA)
    rest_BA = rest_BA / rest_BA.sum(-1, keepdim=True)
    accepted = [torch.minimum(draft_BA, target_BA / factor) for factor in (1.0, *BIASES)]
    residuals = [target_BA, *[rest_BA] * len(BIASES)]
    laws = [
        accepted_BA + (1 - accepted_BA.sum(-1, keepdim=True)) * residual_BA
        for accepted_BA, residual_BA in zip(accepted, residuals, strict=True)
    ]
    roles = [[Role.drafted, Role.opening]] * len(laws) + [[Role.bonus, Role.bonus]]
    return torch.stack([*laws, draft_BA], dim=1), torch.tensor(roles, device=target_BA.device)


def _scores(
    target_BA: Tensor, draft_BA: Tensor, laws_BGA: Tensor, *, is_newest_BA: Tensor, drift_B1: Tensor,
    is_opening_B1: Tensor,
) -> Tensor:  # fmt: skip
    """All scores (B, F, A), in the order of `SCORES`."""
    ratios_BGA = (laws_BGA / target_BA[:, None].clamp_min(_TINY)).clamp_max(_MOST_RATIO)
    acceptance_BA = (target_BA / draft_BA.clamp_min(_TINY)).clamp_max(1.0)
    log_target_BA, log_draft_BA = (target_BA + _FLOOR).log(), (draft_BA + _FLOOR).log()
    is_newest_BA = torch.cat([is_newest_BA, torch.zeros_like(is_newest_BA[:, :1])], 1).to(target_BA.dtype)
    places_BA = _places(target_BA)
    others = [
        log_target_BA - log_draft_BA, log_draft_BA, acceptance_BA, -log_target_BA, is_newest_BA, places_BA,
        places_BA * drift_B1.clamp(-1, 1), places_BA * is_opening_B1,
    ]  # fmt: skip
    return torch.cat([ratios_BGA, torch.stack(others, dim=1)], dim=1)


def _places(target_BA: Tensor) -> Tensor:
    """The middle of each symbol's share of the target's cumulative distribution; 1 / 2 on average."""
    return target_BA.cumsum(-1) - target_BA / 2

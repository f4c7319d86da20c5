"""The exact law of speculative rounds over finished texts: expected rounds, their variance, acceptance by position.

A text that is drawn from the target says nothing of how it was decoded. Given the text, the places where rounds begin
are a Markov renewal: from a beginning, with G_j the probability that at least j of K drafted tokens are accepted, a
round adds j + 1 tokens with probability G_j - G_(j+1), and K + 1 with G_K. The last round adds what is left.

    rule          G_j of a round whose drafted tokens would be x_1, x_2, ...
    speculative   product of min(1, q_i / p_i): the draft proposes x_i and it is accepted, given that it is x_i
    block         min over m <= j of the product of q_i / p_i up to m, not clipped
    coupled       product of a_i = 1 / sum over v of max(p_v, q_v p_x / q_x): the draft's race has the target's winner
    certain       1 as long as what is proposed equals x_i, at any temperature and by any rule

Arrays are aligned at the ends of the texts: index `left` of a place counts the tokens that are still to come, so that
texts of all lengths end together and begin where they do. A text's first token is the prefill's: of n new tokens, the
first round begins with n - 1 left.

Shapes: B texts, T places by tokens left (index 0 is the end), K drafted tokens, D = K + 1 numbers of accepted ones.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class ExpectedRounds(NamedTuple):
    """The expected rounds of some texts.

    Attributes:
        mean_B, variance_B: mean and variance of the cost of each text's rounds; of their number if each round costs 1.
        visits_BT: the probability that a round begins at each place.
    """

    mean_B: Array
    variance_B: Array
    visits_BT: Array


def by_left(tokens_BN: Array, lengths_B: NDArray[np.int64], num_draft_tokens: int) -> Array:
    """Numbers (B, T, K) of the tokens that a round would draft at each place, from numbers of tokens (B, N).

    Tokens after the end of a text have minus infinity.
    """
    num_texts, width = tokens_BN.shape
    left_T, ahead_K = np.arange(width + 1), np.arange(num_draft_tokens)
    places_BTK = lengths_B[:, None, None] - left_T[:, None] + ahead_K
    is_there_BTK = (places_BTK >= 0) & (ahead_K < left_T[:, None])
    found_BTK = tokens_BN[np.arange(num_texts)[:, None, None], np.clip(places_BTK, 0, width - 1)]
    return np.where(is_there_BTK, found_BTK, -np.inf)


def by_left_from(rows_BNK: Array, lengths_B: NDArray[np.int64], num_draft_tokens: int) -> Array:
    """Do as `by_left` from numbers (B, N, K or more) of the tokens that a round would draft after each token count."""
    left_T, ahead_K = np.arange(rows_BNK.shape[1] + 1), np.arange(num_draft_tokens)
    places_BT = np.clip(lengths_B[:, None] - left_T, 0, rows_BNK.shape[1] - 1)
    found_BTK = rows_BNK[np.arange(len(rows_BNK))[:, None], places_BT, :num_draft_tokens]
    return np.where(ahead_K < np.minimum(left_T, lengths_B[:, None])[..., None], found_BTK, -np.inf)


def reach_of(log_ratios_BTK: Array, *, as_block: bool = False) -> Array:
    """Return G (B, T, D) of rounds that begin at each place.

    `log_ratios_BTK` are log q - log p of their tokens, or logarithms, at most 0, of chances to be accepted.
    """
    with np.errstate(invalid="ignore"):
        steps_BTK = log_ratios_BTK if as_block else np.minimum(log_ratios_BTK, 0.0)
        sums_BTK = np.cumsum(steps_BTK, axis=-1)
    sums_BTK = np.where(np.isnan(sums_BTK), -np.inf, sums_BTK)
    least_BTK = np.minimum(np.minimum.accumulate(sums_BTK, axis=-1), 0.0)
    return np.concatenate([np.ones_like(least_BTK[..., :1]), np.exp(least_BTK)], axis=-1)


def added(reach_BTD: Array, num_draft_tokens: int | NDArray[np.int64]) -> Array:
    """Return the probability (B, T, D) that a round that begins at each place adds 1, 2, ... tokens.

    K is one number, or a number for each place, (T,) or (B, T).
    """
    left_T = np.arange(reach_BTD.shape[1])
    return _added(reach_BTD, np.minimum(num_draft_tokens, left_T - 1))


def _added(reach: Array, most_accepted: NDArray[np.int64]) -> Array:
    """See `added`, from G (..., D) and the most tokens that each round can accept."""
    limited = np.where(np.arange(reach.shape[-1]) <= most_accepted[..., None], reach, 0.0)
    further: Array = np.concatenate([limited[..., 1:], np.zeros_like(limited[..., :1])], axis=-1)
    return limited - further


def rounds_of(
    reach_BTD: Array,
    lengths_B: NDArray[np.int64],
    num_draft_tokens: int | NDArray[np.int64],
    costs_BT: Array | float = 1.0,
) -> ExpectedRounds:
    """Expected rounds to produce `lengths_B` new tokens with K drafted tokens per round; K may vary by position.

    `costs_BT` are the costs of rounds that begin at each place.
    """
    num_texts, num_places, _ = reach_BTD.shape
    added_BTD = added(reach_BTD, num_draft_tokens)
    costs_BT = np.broadcast_to(np.asarray(costs_BT, dtype=np.float64), (num_texts, num_places))
    # The probability of each place, and the first two moments of the cost so far where a round begins there.
    moments_3BT = np.zeros((3, num_texts, num_places))
    moments_3BT[0, np.arange(num_texts), np.maximum(lengths_B - 1, 0)] = 1.0
    for left in range(num_places - 1, 0, -1):
        chance_B, first_B, second_B = moments_3BT[:, :, left]
        cost_B = costs_BT[:, left]
        after_3B = np.stack(
            [chance_B, first_B + cost_B * chance_B, second_B + cost_B * (2 * first_B + cost_B * chance_B)]
        )
        for number in range(1, min(added_BTD.shape[2], left) + 1):
            moments_3BT[:, :, left - number] += after_3B * added_BTD[:, left, number - 1]
    visits_BT, mean_B, second_B = moments_3BT[0], moments_3BT[1, :, 0], moments_3BT[2, :, 0]
    return ExpectedRounds(mean_B, np.maximum(second_B - mean_B**2, 0.0), visits_BT)


def least_cost(reach_BTD: Array, lengths_B: NDArray[np.int64], costs: dict[int, float]) -> Array:
    """Return the least expected cost (B,) of the rounds of texts if each round's K could be chosen with G known.

    `costs` has the cost of a round by K; key 0 has that of a plain step.
    """
    num_texts, num_places, _ = reach_BTD.shape
    best_BT, chances = np.zeros((num_texts, num_places)), {number: added(reach_BTD, number) for number in costs}
    for left in range(1, num_places):
        found = []
        for number, cost in costs.items():
            most = min(number + 1, left)
            after_BD = best_BT[:, left - most : left][:, ::-1]
            found.append(cost + (chances[number][:, left, :most] * after_BD).sum(-1))
        best_BT[:, left] = np.min(found, axis=0)
    least_B: Array = best_BT[np.arange(num_texts), np.maximum(lengths_B - 1, 0)]
    return least_B


def rejected(reach_BTD: Array, rounds: ExpectedRounds, num_draft_tokens: int) -> Array:
    """Return how many rounds are expected to reach each token, having accepted all before it, and to reject it.

    The result is (2, B, T).
    """
    visits_BT = rounds.visits_BT
    found_2BT, num_places = np.zeros((2, *visits_BT.shape)), visits_BT.shape[1]
    for ahead in range(min(num_draft_tokens, num_places - 2)):
        places = slice(ahead + 2, None)  # the last token of a text is drawn, whatever was drafted
        tried_BT = visits_BT[:, places] * reach_BTD[:, places, ahead]
        taken_BT = visits_BT[:, places] * reach_BTD[:, places, ahead + 1]
        found_2BT[:, :, 2 : num_places - ahead] += tried_BT, tried_BT - taken_BT
    return found_2BT


def by_position(reach_BTD: Array, rounds: ExpectedRounds, num_draft_tokens: int) -> Array:
    """Return the share (K,) of rounds that accept the token at each position.

    Rounds so near the end of a text that it could cut them short do not count.
    """
    whole = slice(num_draft_tokens + 1, None)
    visits_BT = rounds.visits_BT[:, whole]
    accepted_D: Array = np.einsum("bt,btd->d", visits_BT, reach_BTD[:, whole, : num_draft_tokens + 1])
    return accepted_D[1:] / (accepted_D[0] or 1.0)

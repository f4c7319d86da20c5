"""Expected tokens of a round by the acceptance, and the acceptance by the tokens.

Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8.
"""

from collections.abc import Callable
from functools import lru_cache

Gain = Callable[[float, int], float]
"""Expected tokens of a round by the acceptance and K."""


@lru_cache(maxsize=4096)  # a search asks for the same few pairs
def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens per round, 1 to K + 1: the accepted prefix and one token of the target."""
    return sum(acceptance**power for power in range(num_draft_tokens + 1))


@lru_cache(maxsize=4096)
def overlapped_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round whose drafting overlaps verification, 1 to K.

    Rounds renew at each rejection. The next round examines one token, and with probability a the rounds that follow
    examine K each until one rejects, which takes 1 / (1 - a^K) of them on average. 1 / (1 - a) tokens come from one
    rejection to the next, the corrected one included, in 1 + a / (1 - a^K) rounds. Their ratio is the result.
    """
    examined = sum(acceptance**power for power in range(num_draft_tokens))
    return examined / (1 + acceptance - acceptance**num_draft_tokens)


def overlapped_corrections(acceptance: float, num_draft_tokens: int) -> float:
    """Of `overlapped_tokens`, how many follow a rejection: the rejections per round."""
    whole = acceptance**num_draft_tokens
    return (1 - whole) / (1 + acceptance - whole)


def implied_acceptance(num_tokens: float, num_draft_tokens: int) -> float:
    """Inverse of `tokens_per_round` by the acceptance; 1 beyond K + 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(middle, num_draft_tokens) < num_tokens else (low, middle)
    return high

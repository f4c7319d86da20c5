"""Expected tokens of a round by the acceptance, and the acceptance by the tokens.

Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8.
"""


def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens per round, 1 to K + 1: the accepted prefix and one token of the target."""
    return sum(acceptance**power for power in range(num_draft_tokens + 1))


def implied_acceptance(num_tokens: float, num_draft_tokens: int) -> float:
    """Inverse of `tokens_per_round` by the acceptance; 1 beyond K + 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(middle, num_draft_tokens) < num_tokens else (low, middle)
    return high

"""How many tokens a round yields, and what is known of pairs of models.

Source of the formulae: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from llama_ssp.config.catalogue import conf_dir


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted, and where the figure is from."""

    probability: float
    source: str


def of_pair(target: str, draft: str) -> Acceptance:
    """Look a pair up in `conf/pairs.yaml`; quantized entries count as their base."""
    table = _table()
    names = target.removesuffix("_8bit"), draft.removesuffix("_8bit")
    entry = next((pair for pair in table["pairs"] if (pair["target"], pair["draft"]) == names), table["default"])
    return Acceptance(probability=entry["acceptance"], source=entry["source"])


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load((conf_dir() / "pairs.yaml").read_text(encoding="utf-8"))
    return table


def tokens_per_round(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round: the accepted prefix and one of the target's own, between 1 and K + 1."""
    return sum(acceptance**power for power in range(num_draft_tokens + 1))


def implied_acceptance(num_tokens: float, num_draft_tokens: int) -> float:
    """The acceptance at which a round yields so many tokens: the inverse of `tokens_per_round`, 1 beyond K + 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(middle, num_draft_tokens) < num_tokens else (low, middle)
    return high

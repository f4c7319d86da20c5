"""Expected number of tokens per round, and known acceptance rates of pairs of models.

Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from llama_ssp.config.catalogue import conf_dir


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted, and the source of the figure."""

    probability: float
    source: str


def of_pair(target: str, draft: str) -> Acceptance:
    """Look a pair up in `conf/pairs.yaml`; quantized models have the figure of their base."""
    table = _table()
    names = target.removesuffix("_8bit"), draft.removesuffix("_8bit")
    of_draft = table["drafts"].get(draft, table["default"])
    entry = next((pair for pair in table["pairs"] if (pair["target"], pair["draft"]) == names), of_draft)
    return Acceptance(probability=entry["acceptance"], source=entry["source"])


@cache
def _table() -> dict[str, Any]:
    return dict(yaml.safe_load((conf_dir() / "pairs.yaml").read_text(encoding="utf-8")))


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

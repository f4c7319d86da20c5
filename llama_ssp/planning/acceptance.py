"""Expected number of tokens per round, and known acceptance rates of pairs of models.

Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llama_ssp.config.options import folders
from llama_ssp.errors import ConfigError, one_message


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted, and the source of the figure."""

    probability: float
    source: str


def of_pair(target: str, draft: str) -> Acceptance:
    """Look a pair up in `pairs.yaml`, of the user first; quantized models have the figure of their base.

    A user's file without the form of the package's raises ConfigError.
    """
    table = _table(tuple(folders.folders()))
    names = target.removesuffix("_8bit"), draft.removesuffix("_8bit")
    of_draft = table["drafts"].get(draft, table["default"])
    entry = next((pair for pair in table["pairs"] if (pair["target"], pair["draft"]) == names), of_draft)
    return Acceptance(probability=entry["acceptance"], source=entry["source"])


@cache
def _table(where: tuple[Path, ...]) -> dict[str, Any]:
    """Join the files of several folders; what an earlier one says replaces what a later one says."""
    table: dict[str, Any] = {"pairs": [], "drafts": {}}
    for folder in where:
        if (file := folder / "pairs.yaml").is_file():
            content = _read(file)
            pairs, drafts = table["pairs"] + content.get("pairs", []), content.get("drafts", {}) | table["drafts"]
            table = content | table | {"pairs": pairs, "drafts": drafts}
    return table


def _read(file: Path) -> dict[str, Any]:
    content = folders.read(file)
    if problems := list(_problems(content)):
        raise ConfigError(f"{folders.shown(file)}: {one_message(problems)}")
    for entry in _entries(content).values():
        entry.setdefault("source", folders.shown(file))
    return content


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a file of pairs."""
    parts = {"pairs": list, "drafts": dict, "default": dict}
    yield from (f"{key} is none of {', '.join(parts)}" for key in content if key not in parts)
    wrong = [key for key, kind in parts.items() if not isinstance(content.get(key, kind()), kind)]
    yield from (f"{key} must have the form that conf/pairs.yaml shows" for key in wrong)
    for name, entry in () if wrong else _entries(content).items():
        figure = entry.get("acceptance") if isinstance(entry, dict) else None
        if not isinstance(figure, int | float) or not 0 <= figure <= 1:
            yield f"{name} needs an acceptance between 0 and 1, such as acceptance: 0.8"
        elif name.startswith("pair ") and not all(isinstance(entry.get(key), str) for key in ("target", "draft")):
            yield f"{name} needs target and draft, two names of models"


def _entries(content: Mapping[str, Any]) -> dict[str, Any]:
    """Name all entries of a file for messages."""
    pairs = {f"pair {number}": entry for number, entry in enumerate(content.get("pairs", []), start=1)}
    drafts = {f"draft {name}": entry for name, entry in content.get("drafts", {}).items()}
    return pairs | drafts | ({"default": content["default"]} if "default" in content else {})


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

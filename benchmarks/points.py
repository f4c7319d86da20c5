"""Reads the points of conf/acceptance.yaml: measured and published acceptance of pairs, each with its source."""

from dataclasses import dataclass
from functools import cache

import yaml

from llama_ssp.config import folders
from llama_ssp.config.rules import DEFAULT
from llama_ssp.config.schema import TextKind
from llama_ssp.planning.acceptance.fitted import logit
from llama_ssp.planning.acceptance.pair import DraftedPair
from llama_ssp.planning.acceptance.rounds import implied_acceptance

FILE = "acceptance.yaml"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement of a pair.

    Attributes:
        row: its row in docs/benchmarks/published.md, if it has one.
        is_fitted: whether the fit may use it; its K is known then.
    """

    pair: DraftedPair
    num_draft_tokens: int
    tokens_per_round: float
    source: str
    row: str | None
    is_fitted: bool

    @property
    def names(self) -> tuple[str, str]:
        """Those of target and draft."""
        return self.pair.target, self.pair.draft

    @property
    def acceptance(self) -> float:
        """The acceptance that the tokens per round imply."""
        return implied_acceptance(self.tokens_per_round, self.num_draft_tokens)

    @property
    def odds(self) -> float:
        """What the fit is linear in."""
        return logit(self.acceptance)


@cache
def points() -> tuple[Point, ...]:
    """All points, by pair."""
    content = yaml.safe_load((folders.conf_dir() / FILE).read_text(encoding="utf-8"))
    found = []
    for pair in content["pairs"]:
        target_size, draft_size = pair["parameters"]
        for point in pair["points"]:
            drafted = DraftedPair(
                target=pair["target"], draft=pair["draft"], family=pair["family"], size_ratio=target_size / draft_size,
                own_tokenizer=pair.get("own_tokenizer", False), trained_together=pair.get("trained_together", False),
                temperature=point["temperature"], text=TextKind[point["text"]], rule=point.get("rule", DEFAULT),
            )  # fmt: skip
            found.append(
                Point(
                    pair=drafted,
                    num_draft_tokens=point["K"],
                    tokens_per_round=point["tokens_per_round"],
                    source=point["source"],
                    row=point.get("row"),
                    is_fitted=point.get("k_is_published", True),
                )
            )
    return tuple(found)


def points_by_row() -> dict[str, Point]:
    """The points of docs/benchmarks/published.md."""
    return {point.row: point for point in points() if point.row}

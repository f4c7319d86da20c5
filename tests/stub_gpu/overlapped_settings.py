"""The settings in which overlapped rounds are captured on stub devices."""

from dataclasses import dataclass

PIECES = ("draft", "score", "exchange", "verify")
"""Of a round, each a graph."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How two models decode on ranks of their own.

    Attributes:
        num_draft_ranks: the last ranks.
    """

    num_ranks: int = 2
    num_draft_ranks: int = 1
    batch_size: int = 1
    rule: str = "speculative"
    top_k: int | None = None
    cuda_graphs: bool = True


SETTINGS = {
    "one row": Setting(),
    "five rows": Setting(batch_size=5),
    "top-k": Setting(batch_size=5, top_k=20),
    "coupled": Setting(batch_size=5, rule="coupled"),
    "eager": Setting(batch_size=5, top_k=20, cuda_graphs=False),
    "draft on two ranks": Setting(num_ranks=3, num_draft_ranks=2, batch_size=5),
    "target on two ranks": Setting(num_ranks=3, batch_size=5),
}

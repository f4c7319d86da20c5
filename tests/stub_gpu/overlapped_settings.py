"""The settings in which overlapped rounds are captured on stub devices."""

from dataclasses import dataclass

PIECES = ("draft", "score", "exchange", "verify")
PIECES_OF_A_REFILL = ("draft alone", "exchange alone", "refill")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How two models decode on ranks of their own.

    Attributes:
        waits: rows wait for a block after a rejection.
        num_draft_ranks: the last ranks.
    """

    num_ranks: int = 2
    num_draft_ranks: int = 1
    batch_size: int = 1
    waits: bool = False
    rule: str = "speculative"
    top_k: int | None = None
    cuda_graphs: bool = True

    @property
    def pieces(self) -> tuple[str, ...]:
        """Of a round, each a graph."""
        return PIECES_OF_A_REFILL + PIECES if self.waits else PIECES

    @property
    def num_pieces(self) -> int:
        """How many."""
        return len(self.pieces)


SETTINGS = {
    "one row": Setting(),
    "five rows": Setting(batch_size=5),
    "one row, waits": Setting(waits=True),
    "five rows, waits": Setting(batch_size=5, waits=True),
    "top-k": Setting(batch_size=5, top_k=20),
    "coupled": Setting(batch_size=5, rule="coupled"),
    "eager": Setting(batch_size=5, waits=True, top_k=20, cuda_graphs=False),
    "draft on two ranks": Setting(num_ranks=3, num_draft_ranks=2, batch_size=5),
    "draft on two ranks, waits": Setting(num_ranks=3, num_draft_ranks=2, waits=True),
    "target on two ranks": Setting(num_ranks=3, batch_size=5),
}

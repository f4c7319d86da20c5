"""Says how many tokens each round drafts: always K. What chooses K for each round derives from it.

A choice depends on earlier rounds only, so that the text keeps the target's distribution, and uses no clock, so that
all ranks choose alike.
"""

from collections.abc import Sequence

from llama_ssp.architectures.engine import CATCH_UP_CHUNK
from llama_ssp.speculate.engine.round import DraftChoice


class FixedLength:
    """Chooses the drafts of a run: K tokens in every round.

    Attributes:
        choices: all values that `choose` can return, apart from their `num_unread`.
        num_rows: the rows of the next round that take drafts, where there is a choice; 0 before the first round.
    """

    num_rows = 0

    def __init__(self, num_draft_tokens: int) -> None:
        self.choices: tuple[DraftChoice, ...] = (DraftChoice(num_draft_tokens),)

    def choose(self, num_skipped: Sequence[int]) -> DraftChoice:
        """Choose for the next round; `num_skipped` are the tokens that each drafter has to read first."""
        return self.choices[0]

    def reads_at_once(self, source: int) -> bool:
        """Whether a drafter reads new prompts when they come; if not, it reads them when it first drafts for them."""
        return True

    def observe(self, choice: DraftChoice, num_accepted: Sequence[int]) -> None:
        """Learn how many drafted tokens of a round each running row accepted."""


def num_chunks(num_skipped: int) -> int:
    """Chunks of `CATCH_UP_CHUNK` to read for the tokens that were skipped: a power of two, for few kinds of rounds."""
    return 1 << (-(-num_skipped // CATCH_UP_CHUNK) - 1).bit_length() if num_skipped else 0

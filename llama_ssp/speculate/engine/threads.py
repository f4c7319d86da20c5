"""The threads that compute the rounds of a decoder: as many as torch has, unless an operator of its device chooses."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext


class Threads:
    """The number of threads; this class leaves it as torch has it.

    Attributes:
        slowness: average time of a round by number of threads, where numbers are compared; see `run.slowness`.
        is_undecided: whether a number has not been tried yet.
    """

    @property
    def slowness(self) -> dict[int, float]:
        """See above."""
        return {}

    @property
    def is_undecided(self) -> bool:
        """See above."""
        return False

    def in_use(self) -> AbstractContextManager[None]:
        """Run the block with the chosen number of threads, and restore the earlier number afterwards."""
        return nullcontext()

    def after_round(self, work: Hashable, seconds: float) -> None:
        """Record the time of a round; rounds of equal `work` compute the same."""

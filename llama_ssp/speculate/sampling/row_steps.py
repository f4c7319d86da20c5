"""The steps that rows with settings of their own need in a round; module `by_row` takes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from llama_ssp.architectures.engine import ROWS_WITH_STEPS
from llama_ssp.settings.processors import filters, numbers_of
from llama_ssp.settings.schema import SamplingConfig

MANY = 2**31
"""More rows than any batch has."""


@dataclass(frozen=True, kw_only=True)
class RowSteps:
    """Steps that the rows of a batch need now.

    Attributes:
        filters: names of the filters that some row needs; with `few`, of all filters if any is needed.
        penalizes: whether a row needs a penalty, a bias or a ban.
        has_greedy: whether a row is greedy, or needs another step, which costs more than the step for greedy rows.
        most: one of few numbers, at least that of the rows with filters and that of the rows with penalties.
        limits: whether a row takes fewer drafted tokens than others.
    """

    has_greedy: bool = False
    filters: frozenset[str] = frozenset()
    penalizes: bool = False
    most: int = 0
    limits: bool = False

    @classmethod
    def of(cls, samplings: Sequence[SamplingConfig], *, limits: bool, few: bool = False) -> "RowSteps":
        """The steps that these settings of rows need; with `few`, one of few sets that has them."""
        filtered = [asked for sampling in samplings if (asked := numbers_of(sampling, filters()))]
        num_penalized = sum(sampling.penalizes for sampling in samplings)
        number = max(len(filtered), num_penalized)
        has_greedy = number > 0 or not all(sampling.temperature for sampling in samplings)
        needed = (
            {one.name for one in filters()} if few and number else {one.name for asked in filtered for one, _ in asked}
        )
        if few:
            has_greedy = limits = has_greedy or limits
        return cls(
            has_greedy=has_greedy,
            filters=frozenset(needed),
            penalizes=num_penalized > 0,
            most=next((most for most in (0, *ROWS_WITH_STEPS) if number <= most), MANY),
            limits=limits,
        )

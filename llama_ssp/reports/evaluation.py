"""The verdict of `task=evaluate` as a record of `summary.json`, with the figures behind it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One figure: `value`, and the ends of its interval if it has one. Any of them can be negative."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def cells(self) -> list[str]:
        """The figure as a row of a table: name, value, interval."""
        interval = "" if self.low is None or self.high is None else f"{self.low:.4g} to {self.high:.4g}"
        return [self.name, f"{self.value:.4g}", interval]


MEASURE_COLUMNS = ("", "value", "95 % interval")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The verdict of a suite.

    Attributes:
        reason: why it passed or failed, a clause for `sentence`.
    """

    suite: str
    passed: bool
    reason: str
    measures: list[Measure]

    @property
    def outcome(self) -> str:
        """The verdict in two words."""
        return f"suite={self.suite} {'passed' if self.passed else 'failed'}"

    @property
    def sentence(self) -> str:
        """The verdict and its reason, without a full stop."""
        return f"{self.outcome}: {self.reason}"

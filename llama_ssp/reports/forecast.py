"""What a plan expected of a run, as its summary and its table have it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The plan's forecast of a run; null without a plan.

    Attributes:
        plain_ms_per_token, speculative_ms_per_token: of whole completions, prompts included.
        plain_ms_per_token_low, ...: ends of their 80 % ranges; null where the plan knows none.
        speedup: plain over speculative.
    """

    plain_ms_per_token: float | None = None
    speculative_ms_per_token: float | None = None
    speedup: float | None = None
    plain_ms_per_token_low: float | None = None
    plain_ms_per_token_high: float | None = None
    speculative_ms_per_token_low: float | None = None
    speculative_ms_per_token_high: float | None = None

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The known 80 % ranges of ms/token by mode."""
        both = {
            "plain": (self.plain_ms_per_token_low, self.plain_ms_per_token_high),
            "speculative": (self.speculative_ms_per_token_low, self.speculative_ms_per_token_high),
        }
        return {mode: (low, high) for mode, (low, high) in both.items() if low is not None and high is not None}

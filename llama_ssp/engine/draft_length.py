"""Chooses how many tokens each round drafts: always K, or whatever made most tokens per second so far.

An `AdaptiveLength` knows what each choice costs (constants, measured once and agreed before the first round) and how
many drafted tokens earlier rounds accepted (results that all ranks read alike). It uses no clock, so all ranks choose
alike. The text keeps the target's distribution: a choice depends on earlier rounds only, and each round has uniforms
of its own.

    gain of a choice = (1 + h1 + h1 h2 + ... + h1 ... hK) / cost        h_i: drafted token i is accepted if i - 1 were

The largest gain wins; drafting nothing gains 1 / cost. What is not chosen teaches nothing about drafts, so now and then
a round probes a drafter that is not in use. Probes may take `PROBE_SHARE` of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from llama_ssp.architectures.sizes import CATCH_UP_CHUNK
from llama_ssp.engine.round import DraftChoice

PROBE_SHARE = 0.015
"""Share of the time that probes may lose."""
MOST_SAVED = 10.0
"""Plain tokens whose time probes can save up."""
LASTING_ROUNDS = 10
"""Rounds over which the cost of returning to a drafter is spread."""
MEMORY_ROUNDS = 50
"""Observations of a drafted token count by their age: this many rounds back, by 1 / e."""
PRIOR_WEIGHT = 4.0
"""Rounds that the prior, or the estimate of the token before, counts for."""


class DraftLength(Protocol):
    """Chooses the drafts of a run.

    Attributes:
        choices: whatever `choose` may return, but for `num_unread`.
    """

    @property
    def choices(self) -> tuple[DraftChoice, ...]:
        """See the class."""

    def choose(self, num_skipped: Sequence[int]) -> DraftChoice:
        """Choose for the next round; `num_skipped` are the tokens since each drafter last drafted."""

    def observe(self, choice: DraftChoice, num_accepted: Sequence[int]) -> None:
        """Learn how many drafted tokens of a round each running row accepted."""


class FixedLength:
    """Drafts K tokens in every round."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.choices: tuple[DraftChoice, ...] = (DraftChoice(num_draft_tokens),)

    def choose(self, num_skipped: Sequence[int]) -> DraftChoice:  # noqa: ARG002
        """See `DraftLength`."""
        return self.choices[0]

    def observe(self, choice: DraftChoice, num_accepted: Sequence[int]) -> None:
        """See `DraftLength`."""


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Costs of rounds in any unit of time, the same on all ranks.

    Attributes:
        rounds: of each choice.
        catch_up: by drafter, of reading `CATCH_UP_CHUNK` tokens that it skipped.
    """

    rounds: dict[DraftChoice, float]
    catch_up: tuple[float, ...]


class AdaptiveLength:
    """Drafts what gains most.

    Args:
        costs: of every choice, among them `DraftChoice(0)`.
        acceptance: expected before the first round, by drafter.
    """

    def __init__(self, costs: RoundCosts, *, acceptance: Sequence[float]) -> None:
        self.choices = tuple(costs.rounds)
        self._costs = costs
        longest = max(choice.num_tokens for choice in self.choices)
        self._sources = [_Source(prior, longest) for prior in acceptance]
        self._plain_cost = costs.rounds[DraftChoice(0)]
        self._budget = 0.0

    def choose(self, num_skipped: Sequence[int]) -> DraftChoice:
        """See `DraftLength`."""
        catch_up = [cost * num_chunks(skipped) for cost, skipped in zip(self._costs.catch_up, num_skipped, strict=True)]

        def cost(choice: DraftChoice, *, rounds: int) -> float:
            """Of one of several such rounds, the first of which also reads what its drafter skipped."""
            return self._costs.rounds[choice] + (catch_up[choice.source] / rounds if choice.num_tokens else 0.0)

        gains = {choice: self._tokens(choice) / cost(choice, rounds=LASTING_ROUNDS) for choice in self.choices}
        best = max(gains, key=gains.__getitem__)
        losses = {
            choice: cost(choice, rounds=1) - self._tokens(choice) / gains[best]
            for choice in self.choices
            if choice.num_tokens and not (best.num_tokens and best.source == choice.source)
        }
        if not losses:
            return best
        saved = self._budget + PROBE_SHARE * self._costs.rounds[best]
        self._budget = min(saved, MOST_SAVED * self._plain_cost)
        probe = min(losses, key=losses.__getitem__)
        if losses[probe] > self._budget:
            return best
        self._budget -= max(losses[probe], 0.0)
        return probe

    def observe(self, choice: DraftChoice, num_accepted: Sequence[int]) -> None:
        """See `DraftLength`."""
        if choice.num_tokens:
            self._sources[choice.source].observe(choice.num_tokens, num_accepted)

    def _tokens(self, choice: DraftChoice) -> float:
        return self._sources[choice.source].tokens_of_round[choice.num_tokens]


class _Source:
    """How many drafted tokens of one drafter are accepted.

    Attributes:
        tokens_of_round: expected tokens of a round that drafts 0, 1, 2, ... tokens.
    """

    def __init__(self, prior: float, longest: int) -> None:
        self._prior = prior
        self._accepted, self._tried = [0.0] * longest, [0.0] * longest
        self._update()

    def observe(self, num_drafted: int, num_accepted: Sequence[int]) -> None:
        """Count a round: of each row, the accepted tokens and the first rejected one were tried."""
        for place in range(num_drafted):
            if tried := sum(accepted >= place for accepted in num_accepted):
                kept = 1 - 1 / MEMORY_ROUNDS
                self._tried[place] = kept * self._tried[place] + tried
                self._accepted[place] = kept * self._accepted[place] + sum(n > place for n in num_accepted)
        self._update()

    def _update(self) -> None:
        estimate, estimates = self._prior, list[float]()
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            estimate = (accepted + PRIOR_WEIGHT * estimate) / (tried + PRIOR_WEIGHT)
            estimates.append(estimate)
        self.tokens_of_round: list[float] = [*accumulate(accumulate(estimates, mul), initial=1.0)]


def num_chunks(num_skipped: int) -> int:
    """Chunks of `CATCH_UP_CHUNK` that hold the tokens since a drafter last drafted."""
    return -(-num_skipped // CATCH_UP_CHUNK)

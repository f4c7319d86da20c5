"""Chooses how many tokens each round drafts: whatever made most tokens per second so far.

An `AdaptiveLength` knows what each choice costs (constants, measured once and agreed before the first round) and how
many drafted tokens earlier rounds accepted (results that all ranks read alike). It uses no clock, so all ranks choose
alike. The text keeps the target's distribution, since a choice depends on earlier rounds only, and each round draws
with uniforms of its own.

    gain of a choice = (1 + h1 + h1 h2 + ... + h1 ... hK) / cost        h_i: drafted token i is accepted if i - 1 were

The largest gain wins; drafting nothing gains 1 / cost. An unused drafter teaches nothing about drafts, so now and then
a round probes one. Probes may take `PROBE_SHARE` of the time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llama_ssp.speculate.engine.lengths import FixedLength, num_chunks
from llama_ssp.speculate.engine.round import DraftChoice

PROBE_SHARE = 0.015
"""Share of the time that probes may lose."""
MOST_SAVED = 10.0
"""Plain tokens whose time probes can save up."""
LASTING_ROUNDS = 10
"""Rounds over which the cost of returning to a drafter is spread."""
MEMORY_ROUNDS = 100
"""Age of an observation, in rounds of its drafter, at which it counts 1 / e as much as a new one."""
PRIOR_WEIGHT = 8.0
"""Number of rounds that the prior, or the estimate for the token before, weighs as much as."""


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Costs of rounds in any unit of time, the same on all ranks.

    Attributes:
        rounds: costs of rounds of `num_rows` rows.
        catch_up: for each drafter, the cost of reading `CATCH_UP_CHUNK` tokens that it skipped.
        of_one: costs of rounds of one row, if rounds may leave rows out; empty if each round computes all rows.
    """

    rounds: dict[DraftChoice, float]
    catch_up: tuple[float, ...]
    of_one: dict[DraftChoice, float] = field(default_factory=dict)
    num_rows: int = 1

    def of_rows(self, number: int) -> dict[DraftChoice, float]:
        """Return the costs of rounds of `number` rows, interpolated linearly between one row and all rows."""
        if not self.of_one or not number:
            return self.rounds
        share = (number - 1) / (self.num_rows - 1)
        return {choice: one + share * (self.rounds[choice] - one) for choice, one in self.of_one.items()}


class AdaptiveLength(FixedLength):
    """Takes the choice that gains most, perhaps `DraftChoice(0)`; `acceptance` has each drafter's first estimate."""

    def __init__(self, costs: RoundCosts, *, acceptance: Sequence[float]) -> None:
        self.choices, self._costs = tuple(costs.rounds), costs
        self._sources = [
            _Source(place, self.choices, catch_up=costs.catch_up[place], prior=prior)
            for place, prior in enumerate(acceptance)
        ]
        self._budget = 0.0
        self._plans: dict[object, tuple[DraftChoice, float, DraftChoice | None, float, float]] = {}

    def choose(self, num_skipped: Sequence[int]) -> DraftChoice:
        """See `FixedLength`."""
        best, cost, probe, loss, plain_cost = self._planned(num_skipped)
        if probe is None:
            return best
        self._budget = min(self._budget + PROBE_SHARE * cost, MOST_SAVED * plain_cost)
        if loss > self._budget:
            return best
        self._budget -= loss
        return probe

    def reads_at_once(self, source: int) -> bool:
        """See `FixedLength`.

        With several rows, True while rounds draft with `source`: their texts tell its acceptance. With one row, True
        unless the drafter would lose even if all its tokens were accepted, since it may suit the next text.
        """
        if self.num_rows > 1:
            best = self._planned((0,) * len(self._sources))[0]
            return bool(best.num_tokens) and best.source == source
        return any(self._sources[source].may_gain(costs) for costs in (self._costs.rounds, self._costs.of_one))

    def observe(self, choice: DraftChoice, num_accepted: Sequence[int]) -> None:
        """See `FixedLength`."""
        if choice.num_tokens:
            self._sources[choice.source].observe(choice.num_tokens, num_accepted)
            self._plans.clear()

    def _planned(self, num_skipped: Sequence[int]) -> tuple[DraftChoice, float, DraftChoice | None, float, float]:
        """Return the choice that gains most, its cost, the choice to probe, the probe's loss, and the plain cost.

        The probe is with another drafter. Results are kept until a drafted round is observed, and hold for these
        numbers of skipped chunks and of rows.
        """
        chunks = (*map(num_chunks, num_skipped),)
        if (chunks, self.num_rows) in self._plans:
            return self._plans[chunks, self.num_rows]
        costs = self._costs.of_rows(self.num_rows)
        plain_cost = costs[DraftChoice(0)]
        found = [source.best(costs, number) for source, number in zip(self._sources, chunks, strict=True)]
        best, gain, cost = max((DraftChoice(0), 1 / plain_cost, plain_cost), *found, key=lambda rated: rated[1])
        probes = [
            source.probe(costs, gain, chunks[place])
            for place, source in enumerate(self._sources)
            if not (best.num_tokens and best.source == place)
        ]
        loss, probe = min(probes) if probes else (0.0, None)
        plan = self._plans[chunks, self.num_rows] = best, cost, probe, max(loss, 0.0), plain_cost
        return plan


class _Source:
    """The gains of the choices of one drafter, given by its number; costs are those of `RoundCosts.of_rows`."""

    def __init__(self, number: int, choices: Sequence[DraftChoice], *, catch_up: float, prior: float) -> None:
        self._own = [choice for choice in choices if choice.num_tokens and choice.source == number]
        self._catch_up, self._prior = catch_up, prior
        longest = max(choice.num_tokens for choice in self._own)
        self._accepted, self._tried = [0.0] * longest, [0.0] * longest
        self._update()

    def may_gain(self, costs: Mapping[DraftChoice, float]) -> bool:
        """Whether a choice would gain over plain rounds if all its tokens were accepted."""
        return bool(costs) and any((one.num_tokens + 1) * costs[DraftChoice(0)] > costs[one] for one in self._own)

    def best(self, costs: Mapping[DraftChoice, float], chunks: int) -> tuple[DraftChoice, float, float]:
        """Return the choice that gains most over some rounds after `chunks` of catching up, its gain and its cost."""
        more = self._catch_up * chunks / LASTING_ROUNDS
        gain, choice = max((self._tokens[choice] / (costs[choice] + more), choice) for choice in self._own)
        return choice, gain, costs[choice] + more

    def probe(self, costs: Mapping[DraftChoice, float], gain: float, chunks: int) -> tuple[float, DraftChoice]:
        """Return the smallest expected loss of a probe with this drafter, and the choice that has it.

        The loss is the probe's time, less the time in which rounds of `gain` tokens per unit of time make as many
        tokens.
        """
        more = self._catch_up * chunks
        return min((costs[choice] + more - self._tokens[choice] / gain, choice) for choice in self._own)

    def observe(self, num_drafted: int, num_accepted: Sequence[int]) -> None:
        """Count a round, which has tried the accepted tokens of each row and the first rejected one."""
        kept = 1 - 1 / MEMORY_ROUNDS
        self._tried, self._accepted = ([kept * count for count in counts] for counts in (self._tried, self._accepted))
        for number in num_accepted:
            for place in range(min(number + 1, num_drafted)):
                self._tried[place] += 1
                self._accepted[place] += place < number
        self._update()

    def _update(self) -> None:
        """Estimate each token's acceptance, from its observations and the token before's estimate; then all gains."""
        estimate, reached, tokens = self._prior, 1.0, [1.0]
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            estimate = (accepted + PRIOR_WEIGHT * estimate) / (tried + PRIOR_WEIGHT)
            reached *= estimate
            tokens.append(tokens[-1] + reached)
        self._tokens = {choice: tokens[choice.num_tokens] for choice in self._own}

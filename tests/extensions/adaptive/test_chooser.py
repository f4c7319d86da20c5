"""What a run that chooses K for each round chooses."""

import random

import pytest

from llama_ssp.extensions.adaptive.chooser import PROBE_SHARE, AdaptiveLength, RoundCosts
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.lanes import pairs
from tests.helpers.prefix_runner import PrefixRunner

LENGTHS = (1, 2, 3, 4, 6, 8)


def costs(*, draft_step: float, catch_up: float = 0.0, verified: float = 0.02) -> RoundCosts:
    """Costs in plain tokens: a draft step each, and a little for each token that is verified."""
    rounds = {DraftChoice(length): 1 + length * (draft_step + verified) for length in (0, *LENGTHS)}
    return RoundCosts(rounds=rounds, catch_up=(catch_up,))


def num_accepted(choice: DraftChoice, acceptance: float, rng: random.Random) -> int:
    return next((place for place in range(choice.num_tokens) if rng.random() >= acceptance), choice.num_tokens)


class Simulation:
    """Rounds of an adaptive run whose drafted tokens are accepted with a fixed probability."""

    def __init__(self, acceptance: float, known: RoundCosts) -> None:
        self.length = AdaptiveLength(known, acceptance=[0.7])
        self.known, self.acceptance, self.rng = known, acceptance, random.Random(5)
        self.skipped, self.num_tokens, self.cost = 0, 0, 0.0
        self.chosen: list[int] = []

    def run(self, num_rounds: int) -> float:
        """Cost per token of the next rounds."""
        tokens, cost = self.num_tokens, self.cost
        for number in range(num_rounds):
            if number % 200 == 0:  # a new prompt, which the drafter has read
                self.skipped = 0
            choice = self.length.choose([self.skipped])
            accepted = num_accepted(choice, self.acceptance, self.rng)
            if choice.num_tokens:
                self.cost += self.known.catch_up[0] * -(-self.skipped // 64)
            self.skipped = 0 if choice.num_tokens else self.skipped + 1
            self.length.observe(choice, [accepted])
            self.chosen.append(choice.num_tokens)
            self.num_tokens += accepted + 1
            self.cost += self.known.rounds[choice]
        return (self.cost - cost) / (self.num_tokens - tokens)


def fixed_cost(acceptance: float, known: RoundCosts, length: int) -> float:
    """Cost per token when every round drafts as many tokens."""
    return known.rounds[DraftChoice(length)] / sum(acceptance**power for power in range(length + 1))


@pairs(draft_step=[0.02, 0.1, 0.3], acceptance=[0.3, 0.6, 0.8, 0.95])
def test_it_costs_hardly_more_than_the_best_fixed_length(acceptance: float, draft_step: float) -> None:
    known = costs(draft_step=draft_step)
    run = Simulation(acceptance, known)
    run.run(200)
    best = min(fixed_cost(acceptance, known, length) for length in (0, *LENGTHS))
    assert run.run(4000) < 1.05 * best


def test_one_row_drafts_where_all_rows_would_lose() -> None:
    """And some rows draft fewer tokens than one."""
    of_one, of_all = costs(draft_step=0.1), costs(draft_step=0.9)
    length = AdaptiveLength(
        RoundCosts(rounds=of_all.rounds, catch_up=(0.0,), of_one=of_one.rounds, num_rows=8), acceptance=[0.7]
    )
    chosen = []
    for number in (1, 4, 8):
        length.num_rows = number
        chosen.append(length.choose([0]).num_tokens)
    assert chosen[0] > chosen[1] > chosen[2] == 0


def test_a_prompt_is_not_read_for_drafts_while_the_rows_beside_it_have_none() -> None:
    of_one, of_all = costs(draft_step=0.1), costs(draft_step=0.9)
    length = AdaptiveLength(
        RoundCosts(rounds=of_all.rounds, catch_up=(0.0,), of_one=of_one.rounds, num_rows=8), acceptance=[0.7]
    )
    read = []
    for number in (0, 1, 4, 8):
        length.num_rows = number
        read.append(length.reads_at_once(0))
    assert read == [True, True, True, False]


@pytest.mark.parametrize("catch_up", [0.0, 5.0])
def test_where_drafts_lose_it_decodes_plainly_but_for_probes(catch_up: float) -> None:
    known = costs(draft_step=0.9, catch_up=catch_up)
    run = Simulation(0.5, known)
    run.run(50)
    assert run.run(5000) < 1 + 2 * PROBE_SHARE
    probes = sum(number > 0 for number in run.chosen[50:])
    assert probes, "without a probe it would never learn that drafts are accepted again"


def test_it_drafts_again_when_the_text_turns_predictable() -> None:
    run = Simulation(0.02, costs(draft_step=0.2))
    run.run(600)
    assert sum(run.chosen[-100:]) <= 20
    run.acceptance = 0.95
    run.run(3000)
    assert min(run.chosen[-100:]) >= 3


def test_a_second_drafter_is_found_when_it_becomes_the_better_one() -> None:
    """A copy costs nothing and is rejected, until the text begins to repeat itself."""
    rounds = dict(costs(draft_step=0.15).rounds)
    rounds |= {DraftChoice(length, source=1): 1 + 0.03 * length for length in LENGTHS}
    length = AdaptiveLength(RoundCosts(rounds=rounds, catch_up=(1.0, 0.0)), acceptance=[0.7, 0.24])
    rng, used = random.Random(1), list[int]()
    for number in range(3000):
        choice = length.choose([0, 0])
        acceptance = 0.75 if choice.source == 0 else 0.05 if number < 1500 else 0.97
        length.observe(choice, [num_accepted(choice, acceptance, rng)])
        used.append(choice.source)
    assert sum(used[1000:1500]) < 100
    assert sum(used[-500:]) > 450


@pytest.mark.parametrize(
    ("draft_step", "acceptance", "reads"), [(0.02, 0.7, True), (0.3, 0.0, True), (5.0, 0.7, False)]
)
def test_a_draft_that_cannot_gain_reads_no_prompt(draft_step: float, acceptance: float, reads: bool) -> None:
    """One that is not accepted now may be worth a try behind the next prompt."""
    draft = PrefixRunner(seed=1)
    decoder = make_decoder(PrefixRunner(), draft, num_draft_tokens=8)
    decoder.length = AdaptiveLength(costs(draft_step=draft_step), acceptance=[acceptance])
    complete(decoder, [Request(index=0, prompt_ids=(2, 3, 4), max_new_tokens=20)])
    assert (draft.num_forwards > 0) is reads

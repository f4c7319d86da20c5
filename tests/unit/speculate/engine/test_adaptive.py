"""A run that chooses K for each round: what it chooses, and that its text is the target's whatever it chooses."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.speculate.engine.adaptive import PROBE_SHARE, AdaptiveLength, RoundCosts
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import ScriptedLength, complete, ids_of, make_decoder, outcome
from tests.helpers.lanes import first, heavy, pairs
from tests.helpers.models import build_checkpoint
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import FakeRecorder

LENGTHS = (1, 2, 3, 4, 6, 8)
REQUESTS = [
    Request(index=index, prompt_ids=ids, max_new_tokens=tokens)
    for index, (ids, tokens) in enumerate([((2, 3), 90), ((4, 4, 4), 31), ((5, 6, 7), 12), ((1,), 20)])
]


def test_a_round_that_is_timed_reads_about_as_many_experts_as_one_of_a_text(tmp_path: Path) -> None:
    """Equal tokens would choose alike, and K that do not pay would seem cheap."""
    build_checkpoint(tmp_path / "target", "mixtral", num_local_experts=8, num_hidden_layers=6)
    build_checkpoint(tmp_path / "draft", "llama")
    target, draft = (load_model(Loading(inspect(tmp_path / name))) for name in ("target", "draft"))
    decoder = make_decoder(target, draft, num_draft_tokens=8, temperature=0.8)
    with torch.inference_mode():
        decoder.make_room(REQUESTS)
        decoder.time_rounds([DraftChoice(8)], num_slots=20)
    assert target.experts_read_3 is not None
    num_read, num_expected, _ = target.experts_read_3.tolist()
    assert 0.6 < num_read / num_expected < 1.1


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


SCRIPTS = {
    "lengths": [DraftChoice(4), DraftChoice(1), DraftChoice(3), DraftChoice(2), DraftChoice(4)],
    "pauses": [*[DraftChoice(0)] * 7, DraftChoice(3), DraftChoice(4)],
    "a long pause": [*[DraftChoice(0)] * 70, DraftChoice(4), DraftChoice(2), DraftChoice(4)],
    "two drafters": [DraftChoice(4), DraftChoice(2, 1), DraftChoice(4, 1), DraftChoice(1), DraftChoice(0)],
}


def texts(
    script: Sequence[DraftChoice], *, draft_seed: int = 0, reads_late: bool = False, **options: Any
) -> list[Any]:  # fmt: skip
    options = {"temperature": 0.9, "batch_size": 2, "num_draft_tokens": 4, "ngram": True} | options
    decoder = make_decoder(PrefixRunner(), PrefixRunner(seed=draft_seed), **options)
    decoder.length = ScriptedLength(script, reads_late=reads_late)
    return complete(decoder, REQUESTS)


@pairs(name=["lengths", "pauses", "a long pause"], reads_late=[False, True])
def test_a_draft_that_is_the_target_is_always_accepted_whatever_was_skipped(name: str, reads_late: bool) -> None:
    """A drafter that had not read what it skipped would draft from another text than the target's."""
    for done in texts(SCRIPTS[name], ngram=False, reads_late=reads_late):
        assert done.accepted_lengths[:-1] == done.draft_lengths[:-1]


@pytest.mark.seconds
@pytest.mark.parametrize("replay", [True, heavy(False), FakeRecorder()], ids=["traced", "eager", "recorded"])
@pytest.mark.parametrize("name", first(SCRIPTS, num=2))
def test_greedy_text_and_coupled_text_do_not_depend_on_the_choices(name: str, replay: Any) -> None:  # noqa: ANN401
    for options in ({"temperature": 0.0}, {"rule_name": "coupled"}):
        alone = make_decoder(PrefixRunner(), None, batch_size=2, **({"temperature": 0.9} | options))
        expected = ids_of(complete(alone, REQUESTS))
        assert ids_of(texts(SCRIPTS[name], draft_seed=1, replay=replay, **options)) == expected


@pytest.mark.seconds
@pytest.mark.parametrize("name", first(SCRIPTS, num=2))
def test_executors_agree_on_sampled_text(name: str) -> None:
    eager, traced, recorded = (
        outcome(texts(SCRIPTS[name], draft_seed=1, replay=replay)) for replay in (False, True, FakeRecorder())
    )
    assert eager == traced == recorded


@pytest.mark.seconds
@pytest.mark.parametrize("name", first(SCRIPTS, num=2))
def test_a_drafter_that_reads_prompts_late_drafts_the_same(name: str) -> None:
    """Two drafters share what is known of their caches, and later prompts begin like earlier ones."""
    at_once, late = (outcome(texts(SCRIPTS[name], draft_seed=1, reads_late=each)) for each in (False, True))
    assert at_once == late


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

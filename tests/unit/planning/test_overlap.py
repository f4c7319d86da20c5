"""The forecast of rounds that overlap: the renewal model against a simulation, and its place in plans and searches."""

import random
from dataclasses import replace
from typing import Any

import pytest

from llama_ssp.machines.hardware import load
from llama_ssp.planning.acceptance import constant, overlapped_corrections, overlapped_tokens, tokens_per_round
from llama_ssp.planning.memory import memory
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.search import search
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import OverlappedTime
from llama_ssp.settings.schema import DraftLayout
from tests.helpers.planning import make_spec, times_of


def simulated(acceptance: float, num_drafted: int, *, num_rounds: int = 200_000) -> tuple[float, float]:
    """Tokens and rejections per round, of rounds that are played out."""
    numbers, num_tokens, num_rejections, num_examined = random.Random(5), 0, 0, 1
    for _ in range(num_rounds):
        accepted = next((n for n in range(num_examined) if numbers.random() >= acceptance), num_examined)
        goes_on = accepted == num_examined
        num_tokens += accepted + (not goes_on)
        num_rejections += not goes_on
        num_examined = num_drafted if goes_on else 1
    return num_tokens / num_rounds, num_rejections / num_rounds


@pytest.mark.parametrize(("acceptance", "num_drafted"), [(0.5, 1), (0.9, 2), (0.5, 4), (0.9, 8)])
def test_the_renewal_model_is_what_rounds_yield_on_average(acceptance: float, num_drafted: int) -> None:
    tokens, rejections = simulated(acceptance, num_drafted)
    assert overlapped_tokens(acceptance, num_drafted) == pytest.approx(tokens, rel=0.01)
    assert overlapped_corrections(acceptance, num_drafted) == pytest.approx(rejections, rel=0.02)


def test_shares_of_a_round_add_up() -> None:
    time = OverlappedTime(draft_s=4.0, forward_s=3.0, exchange_s=0.5, verdict_s=0.5)
    assert time.round_s == pytest.approx(5.0)
    forecast = time.document(1.0, 4)
    assert forecast["target_idle_share"] == pytest.approx(1.5 / 5)
    assert forecast["draft_idle_share"] == pytest.approx(1.0 / 5)
    assert forecast["dropped_share"] == 0
    assert time.document(0.0, 4)["dropped_share"] == 1


def apart(**changes: Any) -> PlanSpec:  # noqa: ANN401 - fields
    """A spec on two ranks of a CPU."""
    kind, ranks = DraftLayout.own_gpu, (1,)
    return make_spec(
        "tiny", "tiny-draft", draft_kind=kind, draft_ranks=ranks, device="cpu", cuda_graphs=False, **changes
    )


def test_a_plan_of_rounds_that_overlap_has_their_time_and_shares() -> None:
    machine = replace(load("laptop_cpu"), num_gpus=2)
    ranked = [choice for choice in search(apart(), machine) if choice["overlaps"]]
    assert {choice["draft_kind"] for choice in ranked} == {"own_gpu"}
    assert all("speculation.overlap=true" in choice["settings"] for choice in ranked)
    one_by_one, at_once = times_of(apart(), machine), times_of(apart(overlap=True), machine)
    assert one_by_one.overlap is None
    assert at_once.round_s < one_by_one.round_s
    assert at_once.tokens_per_round == pytest.approx(overlapped_tokens(0.8, 4))
    assert one_by_one.tokens_per_round == pytest.approx(tokens_per_round(constant(0.8, 4)))
    assert document(make_plan(apart(overlap=True), machine))["time"]["overlap"]["dropped_share"] < 1


def test_a_plan_warns_where_overlapping_makes_a_token_slower_and_nowhere_else() -> None:
    machine = replace(load("laptop_cpu"), num_gpus=2)
    warned = set()
    for number in (1, 2, 4, 8):
        in_turn = apart(num_draft_tokens=number)
        overlapped = replace(in_turn, overlap=True)
        slow_s, fast_s = (times_of(spec, machine).speculative_s for spec in (overlapped, in_turn))
        sentences = [text for text in make_plan(overlapped, machine).warnings if "speculation.overlap" in text]
        wanted = (
            f"overlapping drafting and verification does not gain: forecast {1e3 * slow_s:.3f} ms/token with "
            f"speculation.overlap=true, {1e3 * fast_s:.3f} with speculation.overlap=false"
        )
        assert sentences == ([wanted] if slow_s > fast_s else [])
        assert not [text for text in make_plan(in_turn, machine).warnings if "speculation.overlap" in text]
        warned.add(slow_s > fast_s)
    assert warned == {True, False}


def test_on_gpus_a_plan_counts_what_overlapping_keeps() -> None:
    """The probabilities in flight on the rank that verifies."""
    machine = replace(load("g5_12xlarge"), num_gpus=2)
    spec = make_spec("13B_8bit", "7B", draft_kind=DraftLayout.own_gpu, draft_ranks=(1,))
    before, after = (memory(replace(spec, overlap=overlaps), machine) for overlaps in (False, True))
    probabilities = 4 * spec.round_positions * spec.target.shape.vocab_size
    assert after[0].logits_bytes - before[0].logits_bytes == probabilities

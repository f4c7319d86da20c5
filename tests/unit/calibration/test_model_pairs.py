"""Whole runs of random models: what is timed of them, and that forecasts made with it give back what was timed."""

from dataclasses import replace
from itertools import pairwise
from threading import Lock

import pytest
import torch

from llama_ssp.calibration import model_pairs
from llama_ssp.calibration.model_pairs import DecodingPair, Pairs, PairTime, composition, pair_time
from llama_ssp.calibration.random_llama import RandomLlama
from llama_ssp.config import hardware
from llama_ssp.config.hardware import CompositionPoint, HardwareConfig, LinearPoint, Profile, RowsPoint, SizePoint
from llama_ssp.config.machine import machine_of_run
from llama_ssp.config.schema import Dtype
from llama_ssp.distributed.comms import Comm
from llama_ssp.engine.completion import RowCompletion
from llama_ssp.engine.state import Request
from llama_ssp.models.linear import HalfLinear, can_halve
from llama_ssp.models.runner import Runner
from llama_ssp.planning.roofline import working_set_bytes
from llama_ssp.planning.timing import CostModel, timing
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms

pytestmark = pytest.mark.seconds

SMALL, LARGE = RandomLlama(128, 2, 64, from_16_bits=True), RandomLlama(128, 4, 64)
RATIOS = {1: 1.25, 5: 1.5, 32: 0.75}


def _machine(num_ranks: int) -> HardwareConfig:
    """A CPU whose parts take round figures."""
    linear = [
        LinearPoint(dtype=dtype, rows=rows, elements=elements, working_set_bytes=1, s=rows * elements * 1e-9)
        for dtype in ("fp32", "fp16")
        for rows in (1, 64)
        for elements in (1000, 100_000)
    ]
    flat = [SizePoint(size=1, s=3e-5), SizePoint(size=1000, s=3e-5)]
    layer = [RowsPoint(rows=1, width=64, s=1e-4), RowsPoint(rows=64, width=64, s=2e-4)]
    profile = Profile(
        num_ranks=num_ranks, linear=linear, tied_head=linear, layer=layer, frame=layer,
        attention=[SizePoint(size=1, s=1e-15)], draw=flat, verify=flat, all_reduce=flat if num_ranks > 1 else [],
        round_s=2e-5,
    )  # fmt: skip
    return replace(hardware.load("laptop_cpu"), profiles=[profile])


def _composed(machine: HardwareConfig, points: list[CompositionPoint], *, apart: bool = False) -> HardwareConfig:
    (profile,) = machine.profiles
    return replace(machine, profiles=[replace(profile, **{"composition_apart" if apart else "composition": points})])  # type: ignore[arg-type]


def _blank(target: RandomLlama) -> PairTime:
    return PairTime(target=target, draft=model_pairs.DRAFT, prompt_s=1.0, plain_s=1.0, draft_s=1.0, rest_s=1.0)


def _forecast(pair: PairTime, machine: HardwareConfig, num_ranks: int, *, apart: bool = False) -> PairTime:
    """What a machine would take for a pair."""
    job = model_pairs._job(pair, num_ranks, apart=apart)
    clock = CostModel(job, machine_of_run(machine, num_ranks))
    timed = timing(job, clock.hardware)
    draft_s = clock.draft_step_s(2) + 3 * clock.draft_step_s(1)
    assert timed.round_s
    draw_s = clock.plain_s() - clock.forward(clock.target, 1).total_s
    return replace(
        pair, prompt_s=clock.prefill_s(clock.target) + draw_s, plain_s=timed.plain_s, draft_s=draft_s,
        rest_s=timed.round_s - draft_s,
    )  # fmt: skip


def _seconds(pair: PairTime) -> tuple[float, ...]:
    return pair.prompt_s, pair.plain_s, pair.draft_s, pair.rest_s


@pytest.mark.parametrize(("num_ranks", "apart"), [(1, False), (2, False), (2, True)])
def test_forecasts_with_measured_wholes_give_back_what_was_measured(num_ranks: int, apart: bool) -> None:
    bare, pairs = _machine(num_ranks), [_blank(target) for target in model_pairs.TARGETS]
    clocks = [
        CostModel(model_pairs._job(pair, num_ranks, apart=apart), machine_of_run(bare, num_ranks)) for pair in pairs
    ]
    assert clocks[0].draft
    true = [CompositionPoint(rows=1, working_set_bytes=working_set_bytes(clocks[0].draft, bare), ratio=2.0)]
    for clock in clocks:
        assert clock.target.ranks == tuple(range(1 if apart else num_ranks))
        assert clock.target.num_active == num_ranks
        size = working_set_bytes(clock.target, bare)
        true += [CompositionPoint(rows=rows, working_set_bytes=size, ratio=ratio) for rows, ratio in RATIOS.items()]
    took = [_forecast(pair, _composed(bare, true, apart=apart), num_ranks, apart=apart) for pair in pairs]
    found = composition(took, bare, num_ranks=num_ranks, apart=apart)
    assert [replace(point, ratio=0) for point in found] == [replace(point, ratio=0) for point in true]
    assert [point.ratio for point in found] == pytest.approx([point.ratio for point in true])
    for pair in took:
        again = _forecast(pair, _composed(bare, found, apart=apart), num_ranks, apart=apart)
        assert _seconds(again) == pytest.approx(_seconds(pair))


def test_a_whole_that_took_less_than_what_is_beside_its_forwards_is_no_problem_of_the_file() -> None:
    points = composition([replace(_blank(SMALL), plain_s=1e-9)], _machine(1), num_ranks=1)
    assert points[1].ratio == model_pairs.LEAST_RATIO


def test_the_sizes_that_are_timed_lie_apart_and_end_within_the_measured_slots() -> None:
    clocks = [CostModel(model_pairs._job(_blank(target), 1), _machine(1)) for target in model_pairs.TARGETS]
    assert clocks[0].draft
    sizes = [working_set_bytes(seat, clocks[0].hardware) for seat in (clocks[0].draft, *[c.target for c in clocks])]
    assert all(later > 4 * earlier for earlier, later in pairwise(sizes))
    assert {clock.forward(clock.target, 5).attention_s for clock in clocks} == {0.0}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small targets, few completions of each, and ranks that are threads load one after the other."""
    turn, load = Lock(), RandomLlama.load

    def in_turn(stack: RandomLlama, comm: Comm) -> Runner:
        with turn:
            return load(stack, comm)

    monkeypatch.setattr(RandomLlama, "load", in_turn)
    monkeypatch.setattr(model_pairs, "TARGETS", (SMALL, LARGE))
    monkeypatch.setattr(model_pairs, "DRAFT", RandomLlama(64, 1, 64))
    monkeypatch.setattr(model_pairs, "VOCAB_SIZE", 64)
    monkeypatch.setattr(model_pairs, "TURN_S", 0.0)


def test_only_a_model_that_no_rank_shares_takes_what_was_measured_apart() -> None:
    whole, half = (CompositionPoint(rows=1, working_set_bytes=1, ratio=ratio) for ratio in (2.0, 0.5))
    bare, pair = _machine(2), _blank(LARGE)
    machine = _composed(_composed(bare, [half]), [whole], apart=True)
    for apart, ratio in ((True, 2.0), (False, 0.5)):
        before, after = (
            CostModel(model_pairs._job(pair, 2, apart=apart), machine_of_run(each, 2)) for each in (bare, machine)
        )
        times = [clock.forward(clock.target, 1).total_s for clock in (before, after)]
        assert times[1] == pytest.approx(ratio * times[0])


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("num_ranks", "apart"), [(1, False), (2, False), (2, True)])
def test_ranks_decode_all_pairs_together(num_ranks: int, apart: bool) -> None:
    def timed(comm: ThreadComm) -> list[PairTime]:
        pairs = Pairs(comm, apart=apart)
        pairs.turn()
        pairs.turn()
        return pairs.times()

    for times in on_ranks(thread_comms(num_ranks), timed):
        assert [time.target for time in times] == [SMALL, LARGE]
        assert all(min(time.prompt_s, time.plain_s, time.rest_s, time.draft_s) > 0 for time in times)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("apart", "times_as_much"), [(False, 2), (True, 4)])
def test_pairs_beyond_half_of_the_free_memory_are_left_out_on_all_ranks(
    apart: bool, times_as_much: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = SMALL.num_bytes + LARGE.num_bytes

    def held(comm: ThreadComm) -> int:
        return len(Pairs(comm, apart=apart)._pairs)

    for free_bytes, number in ((times_as_much * both, 2), (times_as_much * both - 1, 1)):
        monkeypatch.setattr(model_pairs, "available_bytes", lambda free_bytes=free_bytes: free_bytes)
        assert on_ranks(thread_comms(2), held) == [number, number]


@pytest.mark.usefixtures("few")
def test_the_completions_of_all_turns_count_and_traces_are_recorded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = model_pairs.DRAFT.load(Comm.single())
    pair = DecodingPair(SMALL.load(Comm.single()), draft, Comm.single(), new_tokens=6)
    assert (pair.plain, pair.speculative) == ([], [])
    pair.turn()
    monkeypatch.setattr(model_pairs, "TURN_S", 1e9)
    monkeypatch.setattr(model_pairs, "MOST", 3)
    pair.turn()
    assert [len(pair.plain), len(pair.speculative)] == [4, 4]
    assert {len(each.token_ids) for each in (*pair.plain, *pair.speculative)} == {6}


def _completion(*, busy_s: float, part_s: dict[str, float], num_tokens: int, num_rounds: int) -> RowCompletion:
    request = Request(index=0, prompt_ids=(1,), max_new_tokens=num_tokens)
    return RowCompletion(
        request=request, token_ids=[0] * num_tokens, accepted_lengths=[0] * num_rounds, busy_s=busy_s, part_s=part_s
    )


def test_quartiles_are_taken_of_prompts_plain_tokens_and_both_sides_of_a_round() -> None:
    plain = [
        _completion(busy_s=busy_s, part_s={"draft": 0, "verify": 4, "other": verify_s}, num_tokens=5, num_rounds=0)
        for busy_s, verify_s in ((10.0, 4.0), (53.0, 44.0), (12.0, 4.0), (13.0, 8.0), (60.0, 48.0))
    ]
    fast = [
        _completion(busy_s=99, part_s={"draft": draft_s, "verify": 8, "other": 4}, num_tokens=9, num_rounds=4)
        for draft_s in (90.0, 1.0, 2.0, 90.0, 90.0)
    ]
    time = pair_time(SMALL, plain, fast)
    assert (time.prompt_s, time.plain_s, time.draft_s, time.rest_s) == (2.0, 2.0, 0.5, 3.0)


@pytest.mark.parametrize("stack", [SMALL, LARGE])
def test_a_stack_is_what_the_planner_takes_it_for(stack: RandomLlama) -> None:
    for layer in stack.load(Comm.single())._layers:  # type: ignore[attr-defined]
        is_half = isinstance(layer.qkv, HalfLinear) or layer.qkv._packed.dtype is torch.float16
        assert is_half == (stack.from_16_bits and can_halve())
    assert stack.planned.shape == stack.shape
    assert stack.planned.matrix_dtype("cpu") is (Dtype.fp16 if stack.from_16_bits else Dtype.fp32)
    assert {facts.dtype for facts in stack.tensors.values()} == {stack.dtype}


def test_a_slice_of_a_stack_has_the_size_that_was_asked_for() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    assert SMALL.read(name).shape == (128, 512)
    part = SMALL.read(name, dim=1, parts=[range(8), range(16, 20)], dtype=torch.float32)
    assert part.shape == (128, 12)
    assert torch.equal(part, part.bfloat16().float())
    assert torch.equal(SMALL.read("model.norm.weight"), torch.ones(128, dtype=torch.bfloat16))

"""Whole runs of random models: what is timed of them, and that forecasts made with it give back what was timed."""

from dataclasses import replace
from itertools import pairwise
from threading import Lock

import pytest
import torch

from llama_ssp.calibration import model_pairs
from llama_ssp.calibration.model_pairs import DecodingPair, Pairs, PairTime, RoundTime, composed, composition, pair_time
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
RATIOS = {1: 1.25, 2: 2.0, 5: 1.5, 32: 0.75}
FIRST_S = (2e-4, 3e-4, 5e-4)
LENGTHS = (0, 1, 4)


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


def _with(machine: HardwareConfig, **measured: list[CompositionPoint] | list[SizePoint]) -> HardwareConfig:
    (profile,) = machine.profiles
    return replace(machine, profiles=[replace(profile, **measured)])  # type: ignore[arg-type]


def _blank(target: RandomLlama) -> PairTime:
    rounds = {number: RoundTime(float(number), 1.0) for number in LENGTHS[1:]}
    return PairTime(target=target, draft=model_pairs.DRAFT, prompt_s=1.0, plain_s=1.0, rounds=rounds)


def _forecast(pair: PairTime, machine: HardwareConfig, num_ranks: int, *, apart: bool = False) -> PairTime:
    """What a machine would take for a pair."""
    job = model_pairs._job(pair, num_ranks, apart=apart)
    clock = CostModel(job, machine_of_run(machine, num_ranks))
    timed = timing(job, clock.hardware)
    draw_s = clock.plain_s() - clock.forward(clock.target, 1).total_s
    rounds = {
        number: RoundTime(clock.drafting_s(number), clock.verify_s(number) + clock.host_s) for number in LENGTHS[1:]
    }
    assert timed.round_s == pytest.approx(sum(rounds[4]))
    return replace(pair, prompt_s=clock.prefill_s(clock.target) + draw_s, plain_s=timed.plain_s, rounds=rounds)


def _seconds(pair: PairTime) -> tuple[float, ...]:
    return pair.prompt_s, pair.plain_s, *(part_s for found in pair.rounds.values() for part_s in found)


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
    name = "composition_apart" if apart else "composition"
    took = [_forecast(pair, _with(bare, **{name: true}), num_ranks, apart=apart) for pair in pairs]
    found = composition(took, machine_of_run(bare, num_ranks), num_ranks=num_ranks, apart=apart)
    assert [replace(point, ratio=0) for point in found] == [replace(point, ratio=0) for point in true]
    assert [point.ratio for point in found] == pytest.approx([point.ratio for point in true])
    for pair in took:
        again = _forecast(pair, _with(bare, **{name: found}), num_ranks, apart=apart)
        assert _seconds(again) == pytest.approx(_seconds(pair))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_first_draft_step_takes_longer_behind_a_larger_target(num_ranks: int) -> None:
    bare, pairs = _machine(num_ranks), [_blank(target) for target in model_pairs.TARGETS]
    clocks = [CostModel(model_pairs._job(pair, num_ranks), machine_of_run(bare, num_ranks)) for pair in pairs]
    sizes = [working_set_bytes(clock.target, clock.hardware) for clock in clocks]
    first = [SizePoint(size=size, s=more_s) for size, more_s in zip(sizes, FIRST_S, strict=True)]
    true = _with(bare, first_draft=first)
    for clock, pair, more_s in zip(clocks, pairs, FIRST_S, strict=True):
        slow = CostModel(clock.job, machine_of_run(true, num_ranks))
        assert [slow.drafting_s(number) - clock.drafting_s(number) for number in LENGTHS] == pytest.approx(
            [0.0, more_s, more_s]
        ), pair.target
    took = [_forecast(pair, true, num_ranks) for pair in pairs]
    (profile,) = bare.profiles
    found = composed(replace(profile, first_draft=first[:1]), bare, took)
    assert [point.s for point in found.first_draft] == pytest.approx(FIRST_S)
    for pair in took:
        again = _forecast(pair, replace(bare, profiles=[found]), num_ranks)
        assert _seconds(again) == pytest.approx(_seconds(pair))


def test_a_first_draft_step_as_short_as_the_others_is_no_problem_of_the_file() -> None:
    pair = replace(_blank(SMALL), rounds={1: RoundTime(1e-9, 1.0), 4: RoundTime(4.0, 1.0)})
    (profile,) = _machine(1).profiles
    assert [point.s for point in composed(profile, _machine(1), [pair]).first_draft] == [model_pairs.LEAST_S]


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
    machine = _with(bare, composition=[half], composition_apart=[whole])
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
        assert {(*time.rounds,) for time in times} == {LENGTHS[1:]}
        assert all(min(_seconds(time)) > 0 for time in times)


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
    pair = DecodingPair(SMALL.load(Comm.single()), draft, Comm.single(), new_tokens=6, lengths=LENGTHS)
    assert pair.turns == {0: [], 1: [], 4: []}
    pair.turn()
    monkeypatch.setattr(model_pairs, "TURN_S", 1e9)
    monkeypatch.setattr(model_pairs, "MOST", 3)
    pair.turn()
    for number, turns in pair.turns.items():
        assert [len(turn) for turn in turns] == [1, 3]
        found = [each for turn in turns for each in turn]
        assert {len(each.token_ids) for each in found} == {6}
        assert {length for each in found for length in each.draft_lengths} == ({number} if number else set())


def _completion(*, busy_s: float, part_s: dict[str, float], num_tokens: int, num_rounds: int) -> RowCompletion:
    request = Request(index=0, prompt_ids=(1,), max_new_tokens=num_tokens)
    return RowCompletion(
        request=request, token_ids=[0] * num_tokens, accepted_lengths=[0] * num_rounds, busy_s=busy_s, part_s=part_s
    )


def test_means_of_turns_are_taken_of_prompts_plain_tokens_and_both_sides_of_a_round() -> None:
    def plain(prompt_s: float, tokens_s: float, *, num_tokens: int) -> RowCompletion:
        parts = {"draft": 0.0, "verify": tokens_s / 2, "other": tokens_s / 2}
        return _completion(busy_s=prompt_s + tokens_s, part_s=parts, num_tokens=num_tokens, num_rounds=0)

    def fast(draft_s: float, num_rounds: int) -> RowCompletion:
        parts = {"draft": draft_s, "verify": 2.0 * num_rounds, "other": 1.0 * num_rounds}
        return _completion(busy_s=99, part_s=parts, num_tokens=9, num_rounds=num_rounds)

    stalled = plain(99.0, 99.0, num_tokens=2)
    plains = [
        [plain(2.0, 4.0, num_tokens=5), plain(4.0, 8.0, num_tokens=2)],
        [stalled],
        [plain(5.0, 3.6, num_tokens=2)],
    ]
    fasts = [[fast(2.0, 4), fast(4.0, 2)], [fast(90.0, 1)], [fast(9.0, 3)]]
    time = pair_time(SMALL, {0: plains, 4: fasts})
    assert time.prompt_s == pytest.approx((3.0 + 5.0) / 2)
    assert time.plain_s == pytest.approx((12.0 / 5 + 3.6) / 2), "a turn's tokens count alike, in whichever completion"
    assert time.rounds == {4: pytest.approx(RoundTime((1.0 + 3.0) / 2, 3.0))}


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

"""What profiles are measured from: whole runs of random models, in turns, and the constants that follow."""

import threading
from dataclasses import replace
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.kernels.linear import HalfLinear, can_halve
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import machine_of_run
from llama_ssp.machines.profile import LinearPoint, Profile, RowsPoint, SizePoint
from llama_ssp.models.runner import Runner
from llama_ssp.planning.timing import CostModel
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.process import Ranks
from llama_ssp.run.calibration import model_pairs, profiles
from llama_ssp.run.calibration.model_pairs import Pairs, PairTime, RandomLlama, pair_time
from llama_ssp.run.calibration.profiles import Measured, composed
from llama_ssp.settings.schema import Dtype
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.worlds import ONE_CORE

pytestmark = pytest.mark.seconds

SMALL, LARGE = RandomLlama(128, 2, 64, from_16_bits=True), RandomLlama(128, 4, 64)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small targets, few completions of each, and ranks that are threads load one after the other."""
    turn, load = Lock(), RandomLlama.load

    def in_turn(stack: RandomLlama, comm: Comm) -> Runner:
        with turn:
            return load(stack, comm)

    monkeypatch.setattr(RandomLlama, "load", in_turn)
    monkeypatch.setattr(model_pairs, "TARGETS", {SMALL: 2, LARGE: 1})
    monkeypatch.setattr(model_pairs, "DRAFT", RandomLlama(64, 1, 64))
    monkeypatch.setattr(model_pairs, "VOCAB_SIZE", 64)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("num_ranks", "apart"), [(1, False), (2, False), (2, True)])
def test_ranks_decode_all_pairs_together(num_ranks: int, apart: bool) -> None:
    def timed(comm: ThreadComm) -> tuple[list[PairTime], list[list[int]]]:
        pairs = Pairs(comm, apart=apart)
        pairs.turn()
        pairs.turn()
        (turns, *_) = (pair.turns for pair in pairs._pairs.values())
        return pairs.times(), [[len(turn) for turn in of_mode] for of_mode in turns.values()]

    for times, numbers in on_ranks(thread_comms(num_ranks), timed):
        assert [time.target for time in times] == [SMALL, LARGE]
        assert all(min(time[1:]) > 0 for time in times)
        assert numbers == [[2, 2], [2, 2]], "completions of each mode in each turn"


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


def _completion(draft_s: float, verify_s: float, other_s: float, *, num_tokens: int = 9, num_rounds: int = 0) -> Any:  # noqa: ANN401
    parts = {"draft": draft_s, "verify": verify_s, "other": other_s}
    return SimpleNamespace(token_ids=[0] * num_tokens, accepted_lengths=[0] * num_rounds, part_s=parts)


def test_means_of_turns_are_taken_of_plain_tokens_and_of_both_sides_of_a_round() -> None:
    def plain(tokens_s: float, num_tokens: int) -> Any:  # noqa: ANN401 - stands for a RowCompletion
        return _completion(0.0, tokens_s / 2, tokens_s / 2, num_tokens=num_tokens)

    def fast(draft_s: float, num_rounds: int) -> Any:  # noqa: ANN401 - as above
        return _completion(draft_s, 2.0 * num_rounds, 1.0 * num_rounds, num_rounds=num_rounds)

    plains = [[plain(4.0, 5), plain(8.0, 2)], [plain(99.0, 2)], [plain(3.6, 2)]]
    fasts = [[fast(2.0, 4), fast(4.0, 2)], [fast(90.0, 1)], [fast(9.0, 3)]]
    time = pair_time(SMALL, {0: plains, 4: fasts})
    assert time.plain_s == pytest.approx((12.0 / 5 + 3.6) / 2), "a turn's tokens count alike, in whichever completion"
    assert time[2:] == pytest.approx(((1.0 + 3.0) / 2, 2.0, 1.0))


def _machine(num_ranks: int, **constants: float) -> HardwareConfig:
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
        **constants,
    )  # fmt: skip
    return replace(hardware.load("laptop_cpu"), profiles=[profile])


def _forecast(target: RandomLlama, machine: HardwareConfig, num_ranks: int, *, apart: bool = False) -> PairTime:
    """What a machine would take for a pair."""
    job = profiles._job(PairTime(target, 1.0, 1.0, 1.0, 1.0), num_ranks, apart=apart)
    clock = CostModel(job, machine_of_run(machine, num_ranks))
    return PairTime(target, clock.plain_s(), clock.drafting_s(4), clock.verify_s(4), clock.host_s)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_constants_of_a_machine_are_found_from_what_it_takes_for_pairs(num_ranks: int) -> None:
    constants = {"round_s": 4e-5, "forward_ratio": 1.5, "forward_ratio_apart": num_ranks + 0.5, "first_draft_s": 3e-4}
    true, bare = _machine(num_ranks, **constants), _machine(num_ranks)
    together = [_forecast(target, true, num_ranks) for target in (SMALL, LARGE)]
    apart = [_forecast(target, true, num_ranks, apart=True) for target in (SMALL, LARGE)] if num_ranks > 1 else []
    for before in (bare, true):  # a refresh forgets the constants before
        found = composed(Measured(before.profiles[0], together, apart), bare)
        assert {name: getattr(found, name) for name in constants} == pytest.approx(constants)
    found = composed(Measured(bare.profiles[0], [PairTime(SMALL, 1e-9, 1e-9, 1e-9, 1e-9)]), bare)
    assert (found.forward_ratio, found.first_draft_s) == (profiles.LEAST_RATIO, 0.0), "of times that cannot be"


@pytest.mark.parametrize("stack", [SMALL, LARGE])
def test_a_stack_is_what_the_planner_takes_it_for(stack: RandomLlama) -> None:
    for layer in stack.load(Comm.single())._layers:  # type: ignore[attr-defined]
        is_half = isinstance(layer.qkv.linear, HalfLinear) or layer.qkv.linear._packed.dtype is torch.float16
        assert is_half == (stack.from_16_bits and can_halve())
    assert stack.planned.shape == stack.shape
    assert stack.planned.matrix_dtype("cpu") is (Dtype.fp16 if stack.from_16_bits else Dtype.fp32)
    assert {facts.dtype for facts in stack.tensors.values()} == {stack.dtype}


PAIR = PairTime(RandomLlama(64, 1, 64), plain_s=1.0, draft_s=1.0, verify_s=1.0, other_s=1.0)


class LoggedPairs:
    """Pairs that only say what is done with them."""

    def __init__(self, log: list[str], comm: Comm, *, apart: bool = False) -> None:
        self._log, self._name = log, f"{'apart' if apart else 'shared'} {comm.size}"
        log.append(f"load {self._name}")

    def turn(self) -> None:
        self._log.append(f"turn {self._name}")

    def times(self) -> list[PairTime]:
        return [PAIR._replace(plain_s=float(self._name[-1]))]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pairs_of_all_profiles_decode_in_the_same_turns_after_the_parts(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[list[str]] = [[] for _ in range(num_ranks)]
    own = threading.local()

    def parts(number: int, _name: str) -> Any:  # noqa: ANN401 - stands for a Profile
        own.log.append(f"parts {number}")
        return SimpleNamespace(num_ranks=number)

    def measured(comm: ThreadComm) -> list[profiles.Measured]:
        own.log = logs[comm.rank]
        ranks = Ranks(rank=comm.rank, size=num_ranks, local_rank=comm.rank, local_size=num_ranks)
        return profiles.measure(
            replace(ONE_CORE, comm=comm, ranks=ranks, device=torch.device("meta")), parts, lambda *_step: None
        )

    monkeypatch.setattr(profiles, "Pairs", lambda comm, **options: LoggedPairs(own.log, comm, **options))
    first, *others = on_ranks(thread_comms(num_ranks), measured)
    assert [each.parts.num_ranks for each in first] == [1, 2][:num_ranks]
    assert [[time.plain_s for time in each.together] for each in first] == [[1.0], [2.0]][:num_ranks]
    assert [len(each.apart) for each in first] == [0, 1][:num_ranks]
    assert not any(others)
    shared = ["shared 2", "apart 2"] if num_ranks > 1 else []
    more = [f"parts {num_ranks}"] if num_ranks > 1 else []
    turns = [f"turn {name}" for name in ("shared 1", *shared)] * profiles.NUM_TURNS
    assert logs[0] == ["parts 1", *more, *(f"load {name}" for name in ("shared 1", *shared)), *turns]
    for log in logs[1:]:
        assert log == [*more, *(f"load {name}" for name in shared), *(f"turn {name}" for name in shared * 9)]

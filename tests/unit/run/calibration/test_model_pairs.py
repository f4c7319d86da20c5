"""Whole runs of random models, and what is timed of them."""

from threading import Lock

import pytest
import torch

from llama_ssp.kernels.linear import HalfLinear, can_halve
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.calibration import model_pairs
from llama_ssp.run.calibration.model_pairs import DecodingPair, Pairs, PairTime, RoundTime, pair_time
from llama_ssp.run.calibration.random_llama import RandomLlama
from llama_ssp.settings.schema import Dtype
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.state import Request
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms

pytestmark = pytest.mark.seconds

SMALL, LARGE = RandomLlama(128, 2, 64, from_16_bits=True), RandomLlama(128, 4, 64)
LENGTHS = (0, 1, 4)


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
        assert all(min(time.prompt_s, time.plain_s, *map(min, time.rounds.values())) > 0 for time in times)


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


@pytest.mark.usefixtures("few")
def test_the_first_turn_is_as_long_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pairs, "TURN_S", 1e9)
    monkeypatch.setattr(model_pairs, "MOST", 3)
    pair = DecodingPair(SMALL.load(Comm.single()), None, Comm.single(), new_tokens=6, lengths=(0,))
    pair.turn()
    pair.turn()
    assert [len(turn) for turn in pair.turns[0]] == [3, 3]


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

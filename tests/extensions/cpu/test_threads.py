"""Rounds take the number of threads that is fastest on the machine as it is now."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from llama_ssp import Pair
from llama_ssp.extensions.cpu.threads import ThreadChoice
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.requests import encode
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete
from tests.helpers.lanes import heavy

ROUND_S = {2: 0.5e-3, 1: 0.75e-3}
SLICE_S = 4e-3


class Machine:
    """Two cores, of which other programs may keep one busy: two threads then wait for it in every fifth round."""

    def __init__(self) -> None:
        self.threads = ThreadChoice.up_to(2)
        self.is_busy = False
        self.numbers: list[int] = []

    def rounds(self, count: int, *, late: Callable[[int], bool] = lambda _: False) -> float:
        """Run rounds; returns their seconds."""
        total_s = 0.0
        for index in range(count):
            number = self.threads.number
            waits = (self.is_busy and number > 1 and index % 5 == 0) or late(index)
            seconds = ROUND_S[number] + SLICE_S * waits
            self.threads.record("plain", seconds)
            self.numbers.append(number)
            total_s += seconds
        return total_s


def test_on_a_quiet_machine_all_cores_compute_after_one_trial_of_fewer() -> None:
    machine = Machine()
    machine.rounds(1000)
    assert machine.numbers[-900:] == [2] * 900
    assert machine.numbers.count(1) < 50


def test_next_to_a_busy_core_rounds_take_at_most_a_third_more_than_on_one_thread() -> None:
    machine = Machine()
    machine.is_busy = True
    machine.rounds(100)  # as a run warms up
    for _ in range(10):
        assert machine.rounds(256) < 1.3 * 256 * ROUND_S[1]


def test_a_run_that_starts_next_to_a_busy_core_begins_with_the_free_ones_and_tries_all_later() -> None:
    machine = Machine()
    machine.threads = ThreadChoice.up_to(2, num_free=1)
    machine.is_busy = True
    machine.rounds(256)
    assert set(machine.numbers) == {1}
    assert set(machine.threads.slowness) == {1}
    machine.is_busy = False
    machine.rounds(2000)
    assert machine.numbers[-1000:] == [2] * 1000


def test_a_core_that_becomes_busy_and_free_again_is_left_and_taken() -> None:
    machine = Machine()
    machine.rounds(300)
    machine.is_busy = True
    machine.rounds(100)
    assert machine.threads.number == 1
    machine.rounds(2000)
    machine.is_busy = False
    machine.rounds(8000)
    assert machine.numbers[-1000:] == [2] * 1000


def test_single_late_rounds_change_nothing() -> None:
    machine = Machine()
    machine.rounds(300)
    machine.numbers.clear()
    machine.rounds(2000, late=lambda index: index % 500 == 0)
    assert set(machine.numbers) == {2}


def test_rounds_of_other_work_are_compared_with_their_own_fastest() -> None:
    """Rounds over longer texts take longer; that is no reason to change."""
    threads, numbers = ThreadChoice.up_to(2), []
    for bucket in range(1, 9):
        for _ in range(200):
            numbers.append(threads.number)
            threads.record(bucket, bucket * ROUND_S[threads.number])
    assert set(numbers[200:]) == {2}


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Alternating(ThreadChoice):
    """Another number of threads in every round."""

    def record(self, work: object, seconds: float) -> None:
        """Take no notice of times."""
        self._current = self._candidates[self._current is self._candidates[0]]
        self._tried = None


@pytest.mark.seconds
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("speculative", [heavy(False), True])
@torch.inference_mode()
def test_texts_are_the_same_with_any_number_of_threads(pair: Pair, *, speculative: bool) -> None:
    prompts = [encode(text, pair.models.tokenizer) for text in ("def f(x):", "import")]
    requests = [Request(index=index, prompt_ids=ids, max_new_tokens=24) for index, ids in enumerate(prompts)]
    texts = []
    for threads in (ThreadChoice(), ThreadChoice((1,)), Alternating((2, 1))):
        decoder = build_decoder(pair.models, pair.config, speculative=speculative)
        decoder.threads = threads
        texts.append([done.token_ids for done in complete(decoder, requests)])
        assert torch.get_num_threads() == 2
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.usefixtures("two_threads")
def test_a_user_who_names_a_number_keeps_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_decoder(pair.models, pair.config, speculative=True).threads.is_undecided
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not build_decoder(pair.models, pair.config, speculative=True).threads.is_undecided


@pytest.mark.usefixtures("two_threads")
def test_a_model_whose_bits_depend_on_the_number_keeps_all_cores(pair: Pair) -> None:
    models = replace(pair.models, reuse=replace(pair.models.reuse, are_invariant=False))
    assert not build_decoder(models, pair.config, speculative=True).threads.is_undecided

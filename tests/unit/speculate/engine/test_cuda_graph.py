"""Rounds that are recorded and replayed give the text of rounds launched one by one, whatever changes between them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from llama_ssp import load
from llama_ssp.architectures.engine import sets_of_steps
from llama_ssp.models.runner import Runner
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine import executors
from llama_ssp.speculate.engine.completion import StopRequest
from llama_ssp.speculate.engine.executors import Recorder, tensors_of
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, make_decoder, outcome, requests
from tests.helpers.extensions import module_of
from tests.helpers.kinds import Make, kinds
from tests.helpers.lanes import first, heavy
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.recorded import FakeRecorder

if TYPE_CHECKING:
    from llama_ssp.types import Values

T = TypeVar("T")


@pytest.fixture(scope="module")
def shipped() -> tuple[Runner, Runner]:
    """The shipped pair, whose caches stay where they are while they are large enough."""
    models = load("tiny", "tiny-draft").models
    assert models.draft
    return models.target, models.draft


@kinds
@pytest.mark.parametrize(("batch_size", "temperature"), [(1, 0.9), (3, 0.0), heavy(8, 0.9)])
def test_replayed_rounds_give_the_same_text(make: Make, batch_size: int, temperature: float) -> None:
    recorder = FakeRecorder()
    eager, traced, captured = (
        make(1.0, batch_size=batch_size, temperature=temperature, eos_ids=[4], replay=replay)
        for replay in (False, True, recorder)
    )
    expected = outcome(complete(eager, requests()))
    for _ in range(2):
        assert outcome(complete(traced, requests())) == outcome(complete(captured, requests())) == expected
    assert recorder.num_replayed > 4 * recorder.num_recorded > 0
    assert isinstance(traced.executor, module_of("cpu.executor").TracedExecutor)
    for of_stage in traced.executor.traced.values():
        assert not of_stage.failed
        assert any(of_stage.replays.values())


def test_the_first_round_of_a_width_is_not_recorded(shipped: tuple[Runner, Runner]) -> None:
    """It makes what recording cannot, such as communicators and workspaces."""
    recorder = FakeRecorder()
    captured = make_decoder(*shipped, replay=recorder)
    num_recorded = []
    for _ in range(3):
        complete(captured, [Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=2)])
        num_recorded.append(recorder.num_recorded)
    assert num_recorded == [0, 2, 2]


@pytest.mark.seconds
@pytest.mark.parametrize("number", [0, 1], ids=["the target's", "the draft's"])
def test_a_cache_that_another_decoder_has_replaced_is_noticed(number: int, shipped: tuple[Runner, Runner]) -> None:
    recorder = FakeRecorder()
    captured = make_decoder(*shipped, replay=recorder)
    wanted = [Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=40)]
    first = outcome(complete(captured, wanted))
    num_recorded = recorder.num_recorded
    for batch_size in (2, 1):
        shipped[number].allocate(batch_size=batch_size, capacity=200)
    assert outcome(complete(captured, wanted)) == first
    assert recorder.num_recorded == 2 * num_recorded


@pytest.mark.heavy
def test_what_is_recorded_ahead_is_not_recorded_while_texts_are_written(shipped: tuple[Runner, Runner]) -> None:
    recorder = FakeRecorder()
    captured = make_decoder(*shipped, batch_size=2, replay=recorder)
    wanted = [Request(index=i, prompt_ids=(5, 6, 7 + i), max_new_tokens=100) for i in range(3)]
    with torch.inference_mode():
        captured.make_room(wanted)
        captured.warm_up(wanted)
    assert recorder.num_recorded == 4, "a draft and a verification for each of the widths 64 and 107"
    shorter = [Request(index=9, prompt_ids=(8, 9, 10, 11), max_new_tokens=50)]
    for texts in (wanted, shorter, wanted):
        assert outcome(complete(captured, texts)) == outcome(complete(make_decoder(*shipped, batch_size=2), texts))
    assert recorder.num_recorded == 4


class Living(FakeRecorder):
    """Knows the graphs that nobody has dropped, which must not be in use then."""

    def __init__(self) -> None:
        super().__init__()
        self.living: WeakSet[object] = WeakSet()
        self.most = self.num_waited = 0

    def record(
        self, piece: Callable[[], T], put: Callable[[T], T] = lambda outputs: outputs
    ) -> tuple[T, Callable[[], None]]:
        outputs, replay = super().record(piece, put)
        self.living.add(replay)
        self.most = max(self.most, len(self.living))
        return outputs, replay

    def wait(self) -> None:
        self.num_waited += 1


@pytest.mark.seconds
@pytest.mark.parametrize("overlaps", first([False, True]), ids=["two stages", "four stages that overlap"])
def test_a_long_text_drops_the_graphs_of_buckets_that_were_read_long_ago(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch, shipped: tuple[Runner, Runner]
) -> None:
    """Buckets of 8 slots: a text of 130 tokens passes 17 of them, and the same text again finds none of its first."""
    monkeypatch.setattr(executors, "MOST_GRAPHED_BUCKETS", 3)
    make = overlapped_decoder if overlaps else make_decoder
    wanted = [Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=127)]
    plain, captured = make(*shipped, replay=False), make(*shipped, replay=(recorder := Living()))
    plain.space.bucket_step = captured.space.bucket_step = 8
    expected = outcome(complete(plain, wanted))
    num_recorded = []
    for _ in range(2):
        assert outcome(complete(captured, wanted)) == expected
        num_recorded.append(recorder.num_recorded)
    assert num_recorded[1] == 2 * num_recorded[0] > 10
    assert recorder.most <= 3 * (4 if overlaps else 2)
    assert recorder.num_waited > 20
    assert recorder.num_replayed > num_recorded[1], "most rounds are replayed"


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("unrecordable", "stages"), [("aten::argmax", ["draft", "verify"]), ("aten::cumprod", ["verify"])]
)
def test_a_stage_that_cannot_be_recorded_is_one_warning_and_goes_on_without(
    unrecordable: str, stages: list[str], shipped: tuple[Runner, Runner], caplog: pytest.LogCaptureFixture
) -> None:
    wanted, recorder = [Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=90)], FakeRecorder(unrecordable)
    captured = make_decoder(*shipped, replay=recorder)
    with caplog.at_level(logging.WARNING):
        outcomes = [outcome(complete(captured, wanted)) for _ in range(2)]
    assert outcomes == [outcome(complete(make_decoder(*shipped), wanted))] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{stage} runs from Python, since it could not be captured as a graph: {unrecordable} cannot be recorded"
        for stage in stages
    ]
    assert (recorder.num_replayed > 40) == ("draft" not in stages)


@pytest.mark.seconds
@pytest.mark.parametrize("full", [["draft"], ["verify"], ["draft", "verify"]], ids=str)
def test_a_capture_without_memory_costs_its_stage_alone(
    full: list[str], shipped: tuple[Runner, Runner], caplog: pytest.LogCaptureFixture
) -> None:
    class Full(FakeRecorder):
        def record(
            self, piece: Callable[[], T], put: Callable[[T], T] = lambda outputs: outputs
        ) -> tuple[T, Callable[[], None]]:
            def put_or_fail(found: T) -> T:
                if ("verify" if isinstance(found, torch.Tensor) else "draft") in full:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return put(found)

            return super().record(piece, put_or_fail)

    wanted, recorder = [Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=60)], Full()
    captured = make_decoder(*shipped, replay=recorder)
    with caplog.at_level(logging.WARNING):
        outcomes = [outcome(complete(captured, wanted)) for _ in range(2)]
    assert outcomes == [outcome(complete(make_decoder(*shipped), wanted))] * 2
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == full
    assert (recorder.num_replayed > 20) == (len(full) == 1)


def test_a_gpu_that_is_lost_ends_the_run(shipped: tuple[Runner, Runner]) -> None:
    class Lost(FakeRecorder):
        def record(
            self,
            piece: Callable[[], T],
            put: Callable[[T], T] = lambda outputs: outputs,
        ) -> tuple[T, Callable[[], None]]:
            del piece, put
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        complete(make_decoder(*shipped, replay=Lost()), requests()[:1])


MIXTURES: list[list[dict[str, Any]]] = [
    [{}, {}, {}],
    [{"temperature": 0.0}, {}, {}],
    [{"top_p": 0.9}, {}, {}],
    [{"frequency_penalty": 0.5}, {}, {}],
    [{"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 0.5, "temperature": 0.0}],
    [{"top_p": 0.9, "repetition_penalty": 1.2}, {"top_k": 9}, {"logit_bias": {5: 1.0}}],
]


def mixed(number: int) -> list[Request]:
    """Three rows with the settings of a mixture; the last one of some takes one drafted token."""
    return [
        Request(
            index=row,
            prompt_ids=(5, 6, 7 + row),
            max_new_tokens=20,
            seed=row,
            ignores_eos=True,
            sampling=SamplingConfig(**{"temperature": 1.0} | settings),
            num_draft_tokens=1 if row == 2 and number % 2 else None,
        )
        for row, settings in enumerate(MIXTURES[number])
    ]


class Keeping(Living):
    """Keeps what graphs return, by the number of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[Tensor, ...]] = []

    def record(
        self, piece: Callable[[], T], put: Callable[[T], T] = lambda outputs: outputs
    ) -> tuple[T, Callable[[], None]]:
        outputs, replay = super().record(piece, put)
        self.outputs.append(tensors_of(cast("Values", outputs)))
        return outputs, replay


def by_row(shipped: tuple[Runner, Runner], replay: Recorder | bool, *, num_rows: int = 3) -> Decoder:
    sampling = SamplingConfig(temperature=1.0, by_row=True)
    return make_decoder(*shipped, batch_size=num_rows, replay=replay, sampling=sampling)


@pytest.mark.seconds
def test_graphs_of_all_mixtures_of_settings_leave_their_results_in_one_place(shipped: tuple[Runner, Runner]) -> None:
    """And are few: none, greedy rows, and with penalties or without, of two rows or of all."""
    recorder, plain = Keeping(), by_row(shipped, replay=False)
    captured = by_row(shipped, recorder)
    for number in (*range(len(MIXTURES)), *range(len(MIXTURES))):
        assert outcome(complete(captured, mixed(number))) == outcome(complete(plain, mixed(number))), number
    laws = [outputs[1] for outputs in recorder.outputs if len(outputs) > 1]
    assert 4 <= len(laws) <= sets_of_steps(3)
    assert len({law.untyped_storage().data_ptr() for law in laws}) == 1
    assert len({outputs[0].data_ptr() for outputs in recorder.outputs if len(outputs) == 1}) == 1


@pytest.mark.seconds
def test_of_too_many_graphs_of_a_stage_the_one_that_was_replayed_the_longest_time_ago_is_dropped(
    monkeypatch: pytest.MonkeyPatch, shipped: tuple[Runner, Runner]
) -> None:
    monkeypatch.setattr(executors, "MOST_GRAPHS", 2)
    recorder, plain = Living(), by_row(shipped, replay=False, num_rows=2)
    captured, num_recorded = by_row(shipped, recorder, num_rows=2), []
    for number in (0, 1, 0, 2, 0, 1):
        sampling = mixed(number)[0].sampling
        wanted = [replace(request, sampling=sampling, num_draft_tokens=None) for request in mixed(0)[:2]]
        assert outcome(complete(captured, wanted)) == outcome(complete(plain, wanted)), number
        num_recorded.append(recorder.num_recorded)
    steps = [after - before for before, after in pairwise([0, *num_recorded])]
    assert steps == [2, 2, 0, 2, 0, 2], "a third mixture drops the second one, and not the first"
    assert recorder.most <= 2 * 2
    assert recorder.num_waited > 0


def test_a_wish_to_stop_reaches_a_replayed_round(shipped: tuple[Runner, Runner]) -> None:
    stop_request = StopRequest()
    recorder = FakeRecorder()
    decoder = make_decoder(*shipped, stop_request=stop_request, replay=recorder)
    seen = []
    for stop_request.requested in (False, True):
        complete(decoder, [Request(index=0, prompt_ids=(5, 6), max_new_tokens=30)])
        seen.append((decoder.stopped, recorder.num_recorded))
    assert seen == [(False, 2), (True, 2)]

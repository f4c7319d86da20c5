"""Overlapped rounds that are recorded and replayed give the text of those launched one by one, on one rank and on more.

Where the exchange runs is not shown here: it follows the forward.
"""

import logging
from typing import Any

import pytest
import torch

from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from tests.helpers.decoders import complete, outcome, requests
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.kinds import near_pair
from tests.helpers.lanes import grid, heavy
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import FakeRecorder

pytestmark = pytest.mark.seconds

PIECES = 4
"""Of a round: draft, score, exchange, settle."""
PIECES_OF_A_REFILL = 3
"""Before it: a draft, its exchange, and the rows that it fills."""


@grid(num_draft_tokens=[1, 2, 4], batch_size=[1, 5], temperature=[0.0, 0.9], waits=[False, True])
def test_replayed_rounds_give_the_same_text(
    num_draft_tokens: int, batch_size: int, temperature: float, waits: bool
) -> None:
    def decoder(recorder: FakeRecorder | None) -> Decoder:
        return overlapped_decoder(
            *near_pair(1.0), num_draft_tokens=num_draft_tokens, batch_size=batch_size, temperature=temperature,
            eos_ids=[4], waits=waits, replay=recorder or False,
        )  # fmt: skip

    recorder = FakeRecorder()
    captured, expected = decoder(recorder), outcome(complete(decoder(None), requests()))
    assert outcome(complete(captured, requests())) == expected
    is_refilled = waits and num_draft_tokens > 1
    assert recorder.num_recorded == PIECES + is_refilled * PIECES_OF_A_REFILL
    assert recorder.num_replayed > 2 * recorder.num_recorded
    assert outcome(complete(captured, requests())) == expected, "what the first run left in flight is not read"


@pytest.mark.parametrize(
    ("num_ranks", "num_target_ranks", "waits"), [(2, 1, False), (2, 1, True), heavy(3, 1, False), heavy(3, 2, True)]
)
@pytest.mark.parametrize("rule_name", ["speculative", "coupled"])
def test_ranks_that_replay_give_the_text_of_one_that_does_not(
    num_ranks: int, num_target_ranks: int, waits: bool, rule_name: str
) -> None:
    options: dict[str, Any] = {
        "temperature": 0.9,
        "rule_name": rule_name,
        "batch_size": 3,
        "waits": waits,
        "num_draft_tokens": 4,
    }
    alone = outcome(complete(overlapped_decoder(*near_pair(1.0), replay=False, **options), requests(24)))
    recorders = [FakeRecorder() for _ in range(num_ranks)]

    def one_rank(comm: ThreadComm) -> list[object]:
        made = overlapped_decoder(
            *near_pair(1.0), comm=comm, num_target_ranks=num_target_ranks, replay=recorders[comm.rank], **options
        )
        return outcome(complete(made, requests(24)))

    assert on_ranks(thread_comms(num_ranks), one_rank) == [alone] * num_ranks
    recorded = PIECES + waits * PIECES_OF_A_REFILL
    assert [recorder.num_recorded for recorder in recorders] == [recorded] * num_ranks


@pytest.mark.parametrize("unrecordable", ["aten::gather", "aten::cumprod"], ids=["in the draft", "in the rule"])
def test_a_round_that_cannot_be_recorded_keeps_what_is_in_flight(
    unrecordable: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "num_draft_tokens": 4, "batch_size": 2}
    made = overlapped_decoder(*near_pair(1.0), replay=FakeRecorder(unrecordable), **options)
    expected = outcome(complete(overlapped_decoder(*near_pair(1.0), replay=False, **options), requests()))
    with caplog.at_level(logging.WARNING):
        assert outcome(complete(made, requests())) == expected
    assert isinstance(made.executor, GraphExecutor)
    assert made.executor.failed
    assert len(caplog.records) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_messages_of_one_size_hold_all_that_top_k_leaves_also_of_equal_logits(waits: bool) -> None:
    """The draft draws from just so many tokens, of equal logits some; only these have probabilities."""

    def pair() -> tuple[PrefixRunner, PrefixRunner]:
        target, draft = near_pair(1.0)
        for each in (target, draft):
            each.head[:, 1::2] = each.head[:, :-1:2]
        return target, draft

    sampling, comms = SamplingConfig(temperature=1.0, top_k=3), thread_comms(2)
    options: dict[str, Any] = {"sampling": sampling, "num_draft_tokens": 4, "batch_size": 2, "waits": waits}
    alone = outcome(complete(overlapped_decoder(*pair(), num_left=3, **options), requests()))

    def one_rank(comm: ThreadComm) -> list[object]:
        made = overlapped_decoder(*pair(), comm=comm, replay=FakeRecorder(), num_left=3, **options)
        return outcome(complete(made, requests()))

    assert on_ranks(comms, one_rank) == [alone] * 2
    assert {shape[-1] for shape in comms[1].delivered} == {2 * 3}


@torch.inference_mode()
def test_rounds_that_are_only_timed_stay_within_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU their rows are as long as those of a run, and have as many tokens in flight."""
    monkeypatch.setattr(Comm, "finish", lambda _: None)
    pair = (PrefixRunner(), PrefixRunner())
    for runner in pair:
        runner.reads_by_length = True
    made = overlapped_decoder(*pair, num_draft_tokens=8, replay=False)
    made.make_room(requests())
    made._is_cuda = True
    assert len(made.time_rounds([DraftChoice(8)] * 2, num_slots=made._num_slots, refills=True)) == 2

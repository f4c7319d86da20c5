"""Drafting that overlaps verification writes the target's own text, whatever the draft, the batch and the ranks."""

from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.speculate.engine.round import Stage
from llama_ssp.speculate.engine.state import BatchState
from tests.helpers.decoders import complete, ids_of, make_decoder, outcome, requests, requests_of
from tests.helpers.extensions import need
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.kinds import near_pair
from tests.helpers.lanes import grid, heavy
from tests.helpers.overlapped import complete_on_ranks, overlapped_decoder
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import FakeRecorder

PIECES = 4
"""Of a round: draft, score, exchange, verify."""


@grid(draft_seed=[0, 1], num_draft_tokens=[1, 2, 5], batch_size=[1, 5], replay=[False, True, None])
def test_greedy_text_is_the_targets_own(
    draft_seed: int, num_draft_tokens: int, batch_size: int, replay: bool | None
) -> None:
    target, draft = PrefixRunner(), PrefixRunner(seed=draft_seed)
    made = overlapped_decoder(
        target,
        draft,
        num_draft_tokens=num_draft_tokens,
        batch_size=batch_size,
        replay=FakeRecorder() if replay is None else replay,
    )
    assert ids_of(complete(made, requests())) == target.texts(requests())


def test_penalties_see_the_tokens_in_flight() -> None:
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=1.4)
    plain = complete(make_decoder(near_pair()[0], None, sampling=sampling), requests(24))
    found = complete(overlapped_decoder(*near_pair(), sampling=sampling, batch_size=3), requests(24))
    assert ids_of(found) == ids_of(plain)
    assert sum(map(sum, (each.accepted_lengths for each in found))) > 20


@pytest.mark.seconds
@pytest.mark.parametrize("rule_name", ["speculative", heavy("block")])
def test_sampled_text_depends_neither_on_the_batch_nor_on_the_ranks(rule_name: str) -> None:
    def texts(num_ranks: int, **options: object) -> list[list[int]]:
        found = complete_on_ranks(
            num_ranks, lambda: near_pair(1.0), requests(24), temperature=0.9, rule_name=rule_name, **options
        )
        ids = [ids_of(of_rank) for of_rank in found]
        assert ids == [ids[0]] * num_ranks
        return ids[0]

    alone = texts(1)
    assert alone == texts(2, batch_size=5) == texts(3, num_target_ranks=1) == texts(3, num_target_ranks=2, batch_size=5)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (10, None), heavy(None, 0.5)])
def test_only_tokens_that_are_left_are_sent_and_the_text_is_the_same(top_k: int | None, top_p: float | None) -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=top_k, top_p=top_p)
    sent: list[tuple[int, ...]] = []

    def texts(num_ranks: int) -> list[list[int]]:
        comms = thread_comms(num_ranks)

        def one_rank(comm: ThreadComm) -> list[list[int]]:
            made = overlapped_decoder(*near_pair(1.0), comm=comm, sampling=sampling, batch_size=2)
            return ids_of(complete(made, requests()))

        found = on_ranks(comms, one_rank)[0]
        sent.extend(shape for comm in comms for shape in comm.delivered)
        return found

    assert texts(1) == texts(2)
    widths = {shape[-1] for shape in sent}
    assert (max(widths) < 11) if top_k != 10 else (widths == {11}), "what is hardly shorter is sent whole"


@pytest.mark.parametrize(
    ("num_new", "accepted", "examined"),
    [(1 + 1 + 4 * 5, [1, 4, 4, 4, 4, 4], [1, 4, 4, 4, 4, 4]), (1 + 1 + 4 + 2, [1, 4, 2], [1, 4, 0])],
)
def test_a_draft_that_is_always_accepted_gains_k_tokens_a_round_without_a_bonus(
    num_new: int, accepted: list[int], examined: list[int]
) -> None:
    """The first token of the first block, then whole blocks; rounds that the length limit cuts are not counted."""
    made = overlapped_decoder(PrefixRunner(), PrefixRunner(), num_draft_tokens=4)
    (completion,) = complete(made, requests_of([(1, 2)], num_new))
    assert (completion.accepted_lengths, completion.examined_lengths) == (accepted, examined)
    assert completion.draft_lengths[:2] == [1, 4]


def test_a_round_without_a_block_in_flight_examines_one_token() -> None:
    target, draft = near_pair(1.0)
    (completion,) = complete(overlapped_decoder(target, draft, temperature=0.9, num_draft_tokens=4), [requests()[0]])
    rounds = list(zip(completion.accepted_lengths, completion.draft_lengths, strict=True))
    assert rounds[0][1] == 1
    for (accepted, examined), (_, following) in pairwise(rounds):
        assert following == (4 if accepted == examined else 1)
    assert len({*rounds}) > 3
    num_new = sum(accepted + (accepted < examined) for accepted, examined in rounds[:-1])
    assert 0 < len(completion.token_ids) - 1 - num_new <= 4


def test_no_two_rounds_of_a_row_have_the_same_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's uniforms are a function of the length that it begins at, so all rounds must begin at different ones."""
    starts: list[int] = []
    uniforms = BatchState.uniforms

    def seen(state: BatchState) -> Tensor:
        starts.extend(state.lengths_B.tolist())
        return uniforms(state)

    monkeypatch.setattr(BatchState, "uniforms", seen)
    target, draft = near_pair(1.0)
    made = overlapped_decoder(target, draft, temperature=0.9, num_draft_tokens=4, replay=False)
    (completion,) = complete(made, [requests()[0]])
    num_rounds = len(completion.accepted_lengths)
    assert min(completion.accepted_lengths) == 0
    # The first call draws the token after the prompt, from the uniforms of plain decoding.
    drafting, deciding = starts[1::2], starts[2::2]
    assert drafting == deciding
    assert len({*deciding}) == len(deciding) == num_rounds
    assert starts[0] not in starts[1:]


@pytest.mark.parametrize(("num_ranks", "num_target_ranks"), [(2, 1), heavy(3, 1), heavy(3, 2)])
@pytest.mark.parametrize("rule_name", ["speculative", "coupled"])
def test_ranks_that_replay_give_the_text_of_one_that_does_not(
    num_ranks: int, num_target_ranks: int, rule_name: str
) -> None:
    need("cpu")
    options: dict[str, Any] = {"temperature": 0.9, "rule_name": rule_name, "batch_size": 3, "num_draft_tokens": 4}
    alone = outcome(complete(overlapped_decoder(*near_pair(1.0), replay=False, **options), requests(24)))
    recorders = [FakeRecorder() for _ in range(num_ranks)]

    def one_rank(comm: ThreadComm) -> list[object]:
        made = overlapped_decoder(
            *near_pair(1.0), comm=comm, num_target_ranks=num_target_ranks, replay=recorders[comm.rank], **options
        )
        return outcome(complete(made, requests(24)))

    assert on_ranks(thread_comms(num_ranks), one_rank) == [alone] * num_ranks
    assert [recorder.num_recorded for recorder in recorders] == [PIECES] * num_ranks


class _Stages(FakeRecorder):
    """Writes down, of each turn of a stage, whether it was a replay."""

    def __init__(self, unrecordable: str | None = None) -> None:
        super().__init__(unrecordable)
        self.turns: list[tuple[str, bool]] = []

    def seen(self, executor: GraphExecutor) -> None:
        run = executor.run

        def seen(stage: Stage, *values: Any) -> Any:
            before = self.num_replayed
            result = run(stage, *values)
            if stage.comm:
                self.turns.append((stage.name, self.num_replayed > before))
            return result

        vars(executor)["run"] = seen


@pytest.mark.seconds
@pytest.mark.parametrize("fault", ["capture", "allocation"])
def test_what_one_rank_cannot_replay_no_rank_does(fault: str) -> None:
    """NCCL wants a message to be part of a graph on all of its ranks, or on none."""
    need("cpu")
    recorders = [_Stages("aten::argmax" if (fault, rank) == ("capture", 1) else None) for rank in range(2)]

    def one_rank(comm: ThreadComm) -> None:
        target, draft = near_pair(1.0)
        made = overlapped_decoder(target, draft, comm=comm, replay=recorders[comm.rank], num_draft_tokens=4)
        assert isinstance(made.executor, GraphExecutor)
        recorders[comm.rank].seen(made.executor)
        complete(made, requests(24))
        draft.num_allocations += fault == "allocation"  # as by a decoder of more drafted tokens
        complete(made, requests(24))

    on_ranks(thread_comms(2), one_rank)
    first, second = (recorder.turns for recorder in recorders)
    assert first == second
    is_replayed = dict(first)
    assert is_replayed == {"draft": fault != "capture", "score": True, "exchange": True, "decide": True}
    num_of_draft = sum(name == "draft" and not replayed for name, replayed in first)
    assert num_of_draft == 2 or fault == "capture"


@pytest.mark.seconds
@pytest.mark.parametrize("unrecordable", ["aten::gather", "aten::cumprod"], ids=["in the draft", "in the rule"])
def test_a_round_that_cannot_be_recorded_keeps_what_is_in_flight(unrecordable: str) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "num_draft_tokens": 4, "batch_size": 2}
    made = overlapped_decoder(*near_pair(1.0), replay=FakeRecorder(unrecordable), **options)
    expected = outcome(complete(overlapped_decoder(*near_pair(1.0), replay=False, **options), requests()))
    assert outcome(complete(made, requests())) == expected
    assert isinstance(made.executor, GraphExecutor)
    failed = {"draft", "score", "decide"} if unrecordable == "aten::gather" else {"decide"}
    assert {name for name, _ in made.executor.failed} == failed


@pytest.mark.seconds
def test_messages_of_one_size_hold_all_that_top_k_leaves_also_of_equal_logits() -> None:
    """The draft draws from just so many tokens, of equal logits some; only these have probabilities."""
    need("cpu")

    def pair() -> tuple[PrefixRunner, PrefixRunner]:
        target, draft = near_pair(1.0)
        for each in (target, draft):
            each.head[:, 1::2] = each.head[:, :-1:2]
        return target, draft

    sampling, comms = SamplingConfig(temperature=1.0, top_k=3), thread_comms(2)
    options: dict[str, Any] = {"sampling": sampling, "num_draft_tokens": 4, "batch_size": 2}
    alone = outcome(complete(overlapped_decoder(*pair(), num_left=3, **options), requests()))

    def one_rank(comm: ThreadComm) -> list[object]:
        made = overlapped_decoder(*pair(), comm=comm, replay=FakeRecorder(), num_left=3, **options)
        return outcome(complete(made, requests()))

    assert on_ranks(comms, one_rank) == [alone] * 2
    assert {shape[-1] for shape in comms[1].delivered} == {2 * 3}

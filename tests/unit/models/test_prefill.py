"""Packed prompts give what padded ones give, with no token more than they have."""

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from llama_ssp.kernels.linear import PlainLinear
from llama_ssp.models.cache import Taps
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.prefill import Buckets, Held, Prompts, ShortForwards, read_prompts
from llama_ssp.models.runner import NullRunner
from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.speculate.engine.results import Launched
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, make_decoder, outcome
from tests.helpers.extensions import need
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import heavy, pairs
from tests.helpers.models import load_lean
from tests.helpers.operator_count import OperatorCount
from tests.helpers.recorded import WatchedGraphs
from tests.helpers.varlen_attention import varlen_operator
from tests.unit.models.llama.test_attention import GROUPED, pair
from tests.unit.models.llama.test_decoder import assert_close, modules, random_ids

LENGTHS, ROWS = [5, 37, 1, 20], [2, 0, 3, 1]
BUCKETS = Buckets(step=64, num_slots=64)


def prompts() -> Prompts:
    return Prompts(random_ids(4, 64), torch.tensor(LENGTHS), LENGTHS, longest=max(LENGTHS))


def read(runner: LeanRunner) -> tuple[Tensor, Tensor, list[int]]:
    """The logits after the prompts, those of one more token in each row, and the tokens of each forward of prompts."""
    runner.allocate(batch_size=4, capacity=64)
    runner.forward = Mock(wraps=runner.forward)  # type: ignore[method-assign]
    logits_RV = read_prompts(runner, prompts(), rows=ROWS, buckets=BUCKETS)
    num_tokens = [call.args[0].numel() for call in runner.forward.mock_calls]
    lengths_B1 = torch.tensor(LENGTHS)[torch.tensor(ROWS).argsort()][:, None]
    return logits_RV, runner.forward(random_ids(4, 1), lengths_B1, bucket=64), num_tokens


@pairs(kind=[*GROUPED], chunk=[3, 8, 512])
def test_packed_prompts_give_the_logits_of_padded_ones_and_fill_the_same_slots(
    kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_ssp.models.prefill.PREFILL_CHUNK", chunk)
    packed, padded = (read(runner) for runner in pair(kind, batch_size=4))
    assert_close(packed[0], padded[0])
    assert_close(packed[1], padded[1])
    assert sum(packed[2]) == sum(LENGTHS)
    assert sum(padded[2]) == max(LENGTHS) * len(LENGTHS)
    assert len(packed[2]) <= len(padded[2])
    assert max(packed[2]) <= chunk * len(LENGTHS)


def test_few_operators_stand_around_the_forward_of_a_prompt() -> None:
    """On a CPU each takes tens of microseconds behind the weights of a forward."""
    forward = Mock(return_value=torch.zeros(1, 1, 7))
    runner = Mock(is_invariant=True, is_recurrent=False, packs_prompts=False, forward=forward)
    prompt, counting = Prompts(random_ids(1, 64), torch.tensor([5]), [5], longest=5), OperatorCount()
    with counting:
        read_prompts(runner, prompt, rows=[0], buckets=BUCKETS)
    assert counting.counts.total() == 7
    assert forward.call_args.args[1].tolist() == [[0, 1, 2, 3, 4]]
    assert forward.call_args.kwargs["score_positions_BR"].tolist() == [[4]]


@pytest.mark.parametrize("chunk", [3, 512])
def test_the_rest_of_a_prompt_has_the_logits_of_the_whole_packed_or_padded(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the prompts one is read whole, one goes on from it, one from its own row, and one is equal to the second."""
    monkeypatch.setattr("llama_ssp.models.prefill.PREFILL_CHUNK", chunk)
    ids_RS, lengths = random_ids(4, 64), [37, 20, 5, 20]
    ids_RS[1, :12] = ids_RS[0, :12]
    ids_RS[3] = ids_RS[1]
    whole = Prompts(ids_RS, torch.tensor(lengths), lengths, max(lengths))
    held = [Held(), Held(12, ROWS[0]), Held(3, ROWS[2]), Held(20, ROWS[1])]
    for runner in pair("llama", batch_size=4):
        runner.allocate(batch_size=4, capacity=64)
        wanted_RV = read_prompts(runner, whole, rows=ROWS, buckets=BUCKETS)
        runner.forward(
            random_ids(3, 64) ^ 1, torch.arange(64).expand(3, -1), bucket=64, cache_rows_B=torch.tensor([0, 1, 2])
        )
        runner.forward(ids_RS[2:3, :3], torch.arange(3)[None], bucket=64, cache_rows_B=torch.tensor(ROWS[2:3]))
        assert_close(read_prompts(runner, whole._replace(held=held), rows=ROWS, buckets=BUCKETS), wanted_RV)
        following_B1 = torch.tensor(lengths)[torch.tensor(ROWS).argsort()][:, None]
        logits_BV = runner.forward(torch.full((4, 1), 9), following_B1, bucket=64)[:, 0]
        assert_close(logits_BV[ROWS[1]], logits_BV[ROWS[3]])


@pytest.mark.seconds
def test_prompts_admitted_while_others_decode_give_the_texts_that_they_give_alone() -> None:
    wanted = [
        Request(index=number, prompt_ids=tuple(range(3, 3 + length)), max_new_tokens=4 + 3 * (number % 3))
        for number, length in enumerate((5, 30, 2, 17, 9, 1, 24))
    ]
    target, by_mask = pair("llama", batch_size=3)
    draft, _ = pair("llama, no groups", batch_size=3)
    texts = [completion.token_ids for completion in complete(make_decoder(by_mask, None), wanted)]
    found = complete(make_decoder(target, draft, batch_size=3, replay=False), wanted)
    assert [completion.token_ids for completion in found] == texts


@pytest.mark.parametrize(("others", "packs"), [(["11"], True), (["10"], False)])
def test_ranks_of_a_model_pack_only_if_all_can(others: list[str], packs: bool) -> None:
    """Otherwise their all-reduces would have other shapes, and wait for each other for ever."""
    runner, _ = pair("llama", batch_size=1)
    runner.packs_prompts = True
    runner.agree(Mock(gather_text=lambda text: [text, *others]))
    assert runner.packs_prompts is packs
    absent = NullRunner(device=torch.device("cpu"), vocab_size=11, max_position_embeddings=64)
    absent.agree(Mock(gather_text=lambda text: [text, *others]))
    assert absent.packs_prompts is packs


def test_a_rank_without_the_model_reads_packed_prompts_too() -> None:
    absent = NullRunner(device=torch.device("cpu"), vocab_size=11, max_position_embeddings=64, packs_prompts=True)
    assert read_prompts(absent, prompts(), rows=ROWS, buckets=BUCKETS).shape == (4, 0)


def short_forwards() -> ShortForwards:
    inputs_4M = torch.full((4, 64), -1)
    return ShortForwards(inputs_4M, 4, lambda size, read, given_4M: read(given_4M) * (given_4M.shape[1] == size))


@pytest.mark.parametrize("kind", GROUPED)
def test_a_few_tokens_are_read_in_one_of_few_shapes_as_many_are(kind: str) -> None:
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    by_length, by_mask = pair(kind, batch_size=4)
    some = {by_length: prompts()._replace(short=short_forwards()), by_mask: prompts()}
    for runner, given in some.items():
        runner.allocate(batch_size=4, capacity=64)
        taps = Taps((0, 1), width=runner._width, dtype=torch.float32, device=torch.device("cpu"))
        taps.allocate(batch_size=4, num_slots=64)
        runner.forward = Mock(wraps=runner.forward)  # type: ignore[method-assign]
        logits_RV = read_prompts(runner, given, rows=ROWS, buckets=BUCKETS, taps=taps)
        if given.short:
            assert [call.args[0].shape for call in runner.forward.mock_calls] == [(1, 64)]
        places = zip(ROWS, LENGTHS, strict=True)
        kept = [taps.read(torch.arange(length)[None], torch.tensor([row])) for row, length in places]
        lengths_B1 = torch.tensor(LENGTHS)[torch.tensor(ROWS).argsort()][:, None]
        behind_B1V = runner.forward(random_ids(4, 1), lengths_B1, bucket=64)
        found.append((logits_RV, behind_B1V, torch.cat(kept, 1)))
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@pytest.mark.seconds
@pytest.mark.parametrize(("batch_size", "temperature"), [heavy(1, 0.9), (3, 0.9)])
def test_graphs_read_prompts_and_the_texts_stay_those_of_launches_from_python(
    batch_size: int, temperature: float
) -> None:
    """One of the prompts is too long for a graph, and two are equal."""
    target, draft = (
        load_lean(modules(kind), varlen=varlen_operator, kernel=PlainLinear) for kind in ("llama", "llama, no groups")
    )
    wanted = [
        Request(index=number, prompt_ids=(*range(3, 6), *[7] * rest), max_new_tokens=2 + number % 2)
        for number, rest in enumerate((5, 9, 1, 1, 126, 3, 20, 2, 4))
    ]
    eager, watched = (
        make_decoder(target, draft, batch_size=batch_size, temperature=temperature, replay=replay, num_draft_tokens=1)
        for replay in (False, WatchedGraphs)
    )
    expected = outcome(complete(eager, wanted))
    assert [outcome(complete(watched, wanted)) for _ in range(2)] == [expected] * 2
    assert isinstance(watched.executor, GraphExecutor)
    read: set[Any] = {(name, size) for name, size in watched.executor.captured if "prompts" in name}
    assert {name for name, _ in read} == {"the target's prompts", "prompts of draft 0"}
    assert {size for _, size in read} <= {8, 16, 32, 64, 128}
    assert len(read) == 2 * {1: 3, 3: 3, 8: 1}[batch_size]


@pytest.mark.seconds
@pytest.mark.parametrize("refused", ["the target's prompts", "prompts of draft 0"])
def test_prompts_that_one_rank_cannot_capture_no_rank_replays(refused: str) -> None:
    """NCCL wants a message to be part of a graph on all of its ranks, or on none."""
    need("cpu")
    refusing = type("Refusing", (WatchedGraphs,), {"refused": refused})
    wanted = [Request(index=0, prompt_ids=(3, 4, number), max_new_tokens=2) for number in range(3)]

    def captured(comm: ThreadComm) -> set[str]:
        target, draft = (
            load_lean(modules(kind), comm=comm, varlen=varlen_operator, kernel=PlainLinear)
            for kind in ("llama", "llama, no groups")
        )
        made = make_decoder(
            target,
            draft,
            comm=comm,
            holders=(comm, comm),
            num_draft_tokens=1,
            replay=refusing if comm.rank else WatchedGraphs,
        )
        complete(made, wanted)
        assert isinstance(made.executor, GraphExecutor)
        return {name for name, _ in made.executor.captured}

    first, second = on_ranks(thread_comms(2), captured)
    assert first == second
    assert len(first) == 3
    assert refused not in first


def test_one_rank_gives_the_first_token_away_before_its_draft_reads_the_prompt() -> None:
    target, draft = (pair(kind, batch_size=1)[0] for kind in ("llama", "llama, no groups"))
    decoder, calls = make_decoder(target, draft, replay=False), Mock()
    target.forward = calls.target = Mock(wraps=target.forward)  # type: ignore[method-assign]
    draft.forward = calls.draft = Mock(wraps=draft.forward)  # type: ignore[method-assign]
    with patch.object(Launched, "of", Mock(wraps=Launched.of)) as calls.launch:
        complete(decoder, [Request(index=0, prompt_ids=(3, 4, 5), max_new_tokens=1)])
    assert [name for name, *_ in calls.mock_calls] == ["target", "launch", "draft"]

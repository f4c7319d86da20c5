"""A recorded stage reads what stays in place, or what is counted as an allocation: every drafter, tree and mode.

Each decoder runs several texts in one process, short and long, with another decoder of the same target in between.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.models.cache import Taps
from llama_ssp.models.llama.head import HeadRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import NullRunner, Runner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.head import HeadDrafter
from llama_ssp.speculate.drafters.shared import BroadcastDrafter, TapsSender
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.head import HeadSource
from tests.helpers.decoders import ScriptedLength, complete, make_decoder, outcome, parts_of, tree_of
from tests.helpers.draft_heads import SMALL_WIDTH, save_small_pair
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.kinds import KINDS, near_pair
from tests.helpers.lanes import first, heavy, slow
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.recorded import WatchedGraphs

CPU = torch.device("cpu")
NUM_DRAFTED = 3
RUNS = (12, 12, 70, 12)
"""New tokens of the longest text, run by run."""
Make = Callable[..., Decoder]


def outcomes(decoder: Decoder, between: Decoder | None = None) -> list[list[object]]:
    """What each run decides; `between` writes longer texts after the second one."""
    found = []
    for number, num_new in enumerate(RUNS):
        if between and number == 2:
            complete(between, wanted(100))
        found.append(outcome(complete(decoder, wanted(num_new))))
    return found


def wanted(num_new: int) -> list[Request]:
    prompts: Sequence[tuple[int, ...]] = ((5, 9, 1, 4, 2), (3,), (7, 8, 7, 8, 7))
    return [
        Request(index=place, prompt_ids=ids, max_new_tokens=max(num_new - 40 * place, 5))
        for place, ids in enumerate(prompts)
    ]


def check_recorded(make: Make, plain: Callable[[], Decoder] | None = None) -> None:
    expected, recorded = outcomes(make(replay=False)), make(replay=WatchedGraphs)
    assert outcomes(recorded, plain and plain()) == expected
    assert isinstance(recorded.executor, WatchedGraphs)
    assert recorded.executor.num_compared > 20
    assert not recorded.executor.failed


def choosing(**options: Any) -> Decoder:  # noqa: ANN401
    """A decoder that chooses a drafter and K for each round."""
    decoder = make_decoder(*near_pair(1.0), ngram=True, num_draft_tokens=4, **options)
    decoder.length = ScriptedLength([DraftChoice(*each) for each in ((4,), (0,), (2,), (4, 1), (1, 1))])
    return decoder


def of_tree(shape: str, **options: Any) -> Decoder:  # noqa: ANN401
    return make_decoder(*near_pair(1.0), tree=shape, **options)


MAKERS: dict[str, Make] = {
    **{name: partial(make, 1.0) for name, make in KINDS.items()},
    **{f"{shape} of a model": partial(of_tree, shape) for shape in ("2x2x1", "dynamic-7x3x3")},
    "a tree by look-up": lambda **how: make_decoder(near_pair(1.0)[0], None, ngram=True, tree="3x2x1", **how),
    "a choice for each round": choosing,
}


@pytest.mark.parametrize("name", first(MAKERS, num=2))
def test_every_kind_of_draft(name: str) -> None:
    check_recorded(partial(MAKERS[name], temperature=0.9, batch_size=2))


@pytest.mark.parametrize("num_target_ranks", [1, heavy(2)])
def test_rounds_that_overlap_on_ranks(num_target_ranks: int) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "batch_size": 2, "num_draft_tokens": 4}
    expected = outcomes(overlapped_decoder(*near_pair(1.0), replay=False, **options))

    def one_rank(comm: ThreadComm) -> list[list[object]]:
        return outcomes(overlapped_decoder(
            *near_pair(1.0), comm=comm, num_target_ranks=num_target_ranks, replay=WatchedGraphs, **options,
        ))  # fmt: skip

    num_ranks = num_target_ranks + 1
    assert on_ranks(thread_comms(num_ranks), one_rank) == [expected] * num_ranks


def head_decoder(
    origin: HeadSource, target: Runner, *, comm: Comm, shape: str | None, replay: type[WatchedGraphs] | bool
) -> Decoder:
    """A decoder with a head, which is on the last rank of `comm`; its targets' other ranks have the target."""
    tree, taps = tree_of(shape), Taps(origin.layers, width=SMALL_WIDTH, dtype=torch.float32, device=CPU)
    number = tree.num_drafted if tree else NUM_DRAFTED

    def make(rule: Any) -> Any:  # noqa: ANN401
        is_last = comm.rank == comm.size - 1
        head = load_model(Loading(origin, dtype=torch.float32)) if is_last else None
        parts = parts_of(head=head, taps=taps, rule=rule, tree=tree, vocab_size=target.vocab_size)
        inner = HeadDrafter(parts) if is_last else None
        if comm.size == 1:
            return inner
        sender = TapsSender(taps, 0, most_accepted=tree.depth if tree else number)
        return BroadcastDrafter(inner, parts, comm=comm, src=comm.size - 1, taps=sender)

    if comm.rank < comm.size - 1 or comm.size == 1:
        own: Runner = target
    else:
        own = NullRunner(device=CPU, vocab_size=target.vocab_size, max_position_embeddings=512)
    return make_decoder(own, None, batch_size=2, make_drafter=make, comm=comm, taps=taps, tree=tree, replay=replay,
                        num_draft_tokens=number)  # fmt: skip


def small_pair(folder: Path) -> tuple[HeadSource, Runner]:
    """A head, and its target."""
    files, origin = save_small_pair(folder)
    target = load_model(Loading(files, dtype=torch.float32))
    assert not isinstance(target, HeadRunner)
    return origin, target


@pytest.mark.parametrize("shape", [heavy(None), heavy("2x2x1"), slow("dynamic-7x3x3")])
def test_a_head(shape: str | None, tmp_path: Path) -> None:
    origin, target = small_pair(tmp_path)
    check_recorded(
        lambda replay: head_decoder(origin, target, comm=Comm.single(), shape=shape, replay=replay),
        plain=lambda: make_decoder(target, None, batch_size=2),
    )


def test_taps_that_other_rounds_have_moved_are_an_allocation() -> None:
    taps = Taps((0,), width=4, dtype=torch.float32, device=CPU)
    decoder = make_decoder(near_pair()[0], None, taps=taps)
    before = decoder.round.num_allocations
    taps.allocate(batch_size=1, num_slots=8)
    assert decoder.round.num_allocations != before


@pytest.mark.heavy
def test_a_head_on_a_rank_of_its_own(tmp_path: Path) -> None:
    origin, target = small_pair(tmp_path)
    expected = outcomes(head_decoder(origin, target, comm=Comm.single(), shape=None, replay=False))

    def one_rank(comm: ThreadComm) -> list[list[object]]:
        decoder = head_decoder(origin, target, comm=comm, shape=None, replay=WatchedGraphs)
        return outcomes(decoder, None if comm.rank else make_decoder(target, None, batch_size=2))

    assert on_ranks(thread_comms(2), one_rank) == [expected] * 2

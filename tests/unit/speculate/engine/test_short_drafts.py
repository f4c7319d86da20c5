"""Rows that outgrow the context of their draft go on plainly: the same law and seeds, whatever else is in the batch."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from llama_ssp.speculate.drafters.limited import DraftLimit
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete, ids_of, make_decoder, outcome, requests_of, tree_of
from tests.helpers.kinds import near_pair
from tests.helpers.lanes import pairs
from tests.helpers.overlapped import complete_on_ranks
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import WatchedGraphs

CONTEXT, K = 24, 3
LENGTHS = (3, 9, 22, 23, 40, 1)
"""Of prompts: the draft serves some of them to the end, some for a while, and others never."""


class Short(PrefixRunner):
    """A model that fails beyond its context, as one with a table of positions does."""

    def forward(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, **named: Any) -> torch.Tensor:
        assert positions_BT.is_meta or int(positions_BT.max()) < CONTEXT
        return super().forward(ids_BT, positions_BT, **named)


def decoded(
    shape: str | None = None,
    *,
    temperature: float = 0.9,
    batch_size: int = 1,
    replay: Any = False,
    sharpness: float = 1.0,
    drafts: bool = True,
    num_new: int = 20,
    lengths: Sequence[int] = LENGTHS,
) -> list[RowCompletion]:
    target, draft = short_pair(sharpness)
    tree = tree_of(shape)
    decoder = make_decoder(
        target,
        draft if drafts else None,
        temperature=temperature,
        batch_size=batch_size,
        tree=tree,
        replay=replay,
        limit=DraftLimit(CONTEXT, tree.depth if tree else None) if drafts else None,
    )
    return complete(decoder, requests(lengths, num_new))


def short_pair(sharpness: float = 1.0) -> tuple[PrefixRunner, Short]:
    target, near = near_pair(sharpness)
    draft = Short(sharpness=sharpness)
    draft.head = near.head
    return target, draft


def requests(lengths: Sequence[int], num_new: int) -> list[Request]:
    prompts = [tuple((7 * place + number) % 11 for place in range(length)) for number, length in enumerate(lengths)]
    return requests_of(prompts, num_new)


def overlapped(num_ranks: int = 1, lengths: Sequence[int] = LENGTHS, **options: Any) -> list[RowCompletion]:
    found = complete_on_ranks(
        num_ranks,
        short_pair,
        requests(lengths, 20),
        **{"temperature": 0.9, "replay": False, "limit": DraftLimit(CONTEXT)} | options,
    )
    assert all(outcome(of_rank) == outcome(found[0]) for of_rank in found)
    return found[0]


@pairs(shape=[None, "2x2x1", "dynamic-7x3x3"], batch_size=[1, 4])
def test_greedy_text_is_plain_text(shape: str | None, batch_size: int) -> None:
    plain = ids_of(decoded(drafts=False, temperature=0.0))
    found = decoded(shape, temperature=0.0, batch_size=batch_size)
    assert ids_of(found) == plain


@pytest.mark.seconds
@pytest.mark.parametrize("shape", [None, "2x2x1"])
def test_a_sampled_text_depends_on_no_other_row_and_no_executor(shape: str | None) -> None:
    wanted = ids_of(decoded(shape))
    for options in ({"batch_size": 4}, {"batch_size": 4, "replay": True}, {"batch_size": 3, "replay": WatchedGraphs}):
        assert ids_of(decoded(shape, **options)) == wanted


def test_beyond_the_draft_tokens_are_those_of_plain_decoding_and_count_in_no_rate() -> None:
    plain = decoded(drafts=False, lengths=(CONTEXT - K + 1, CONTEXT - K + 2), num_new=30)
    within, beyond = decoded(lengths=(CONTEXT - K + 1, CONTEXT - K + 2), num_new=30)
    assert beyond.token_ids == plain[1].token_ids
    assert not any(beyond.draft_lengths)
    assert within.draft_lengths[0] == 0, "its first token, after the prompt, is the last one within"
    shorter = decoded(lengths=(CONTEXT - K,), num_new=30)[0]
    assert (shorter.draft_lengths[0], sum(shorter.draft_lengths[1:])) == (K, 0)
    assert shorter.examined_lengths[1:] == [0] * (len(shorter.draft_lengths) - 1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_greedy_text_of_rounds_that_overlap_is_plain_text(num_ranks: int) -> None:
    plain = decoded(drafts=False, temperature=0.0)
    found = overlapped(num_ranks, batch_size=3, temperature=0.0)
    assert ids_of(found) == ids_of(plain)
    assert sum(map(sum, (each.accepted_lengths for each in found))) > 10


@pytest.mark.seconds
def test_a_sampled_text_of_rounds_that_overlap_depends_on_no_other_row_rank_or_executor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = ids_of(overlapped())
    for num_ranks, batch_size, replay in ((1, 4, False), (2, 3, False), (2, 4, True)):
        found = overlapped(num_ranks, batch_size=batch_size, replay=replay)
        assert ids_of(found) == wanted
    assert not caplog.records, "all stages are traced, also those of plain rounds"


def test_rounds_that_overlap_go_on_plainly_from_the_same_token() -> None:
    beyond = CONTEXT - K + 2
    (plain,) = decoded(drafts=False, lengths=(beyond,))
    (found,) = overlapped(lengths=(beyond,))
    assert found.token_ids == plain.token_ids
    assert not any(found.draft_lengths)
    (served,) = overlapped(lengths=(6,))
    rounds = list(zip(served.accepted_lengths, served.draft_lengths, strict=True))
    starts = accumulate((each + (each < most or not most) for each, most in rounds), initial=7)
    drafted_at = [start for start, (_, most) in zip(starts, rounds, strict=False) if most]
    assert min(drafted_at) == 7
    assert CONTEXT - 2 * K + 1 <= max(drafted_at) <= CONTEXT - K + 1, "with two tokens in flight at most"

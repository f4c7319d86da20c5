"""Rows of one batch that take fewer drafted tokens than a round drafts, or none."""

from typing import Any

import pytest
import torch

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.state import Request
from tests.helpers.kinds import KINDS
from tests.helpers.recorded import WatchedGraphs

BY_ROW = SamplingConfig(temperature=1.0, by_row=True)
ROWS = (None, 0, 1, 2, 0)


@torch.inference_mode()
def decoded(
    limits: tuple[int | None, ...] = ROWS, *, kind: str = "model", temperature: float = 0.8, **options: Any
) -> list[RowCompletion]:
    """One completion for each limit, of prompts of their own, all by one batch."""
    options = {"sampling": BY_ROW, "batch_size": 5} | options
    decoder = KINDS[kind](1.0, **options)
    sampling = SamplingConfig(temperature=temperature)
    requests = [
        Request(
            index=place,
            prompt_ids=(place + 1, 4, 2),
            max_new_tokens=40,
            sampling=sampling,
            num_draft_tokens=most,
            seed=3,
        )
        for place, most in enumerate(limits)
    ]
    done = dict[int, RowCompletion]()
    for updates in decoder.run(requests):
        done |= {update.completion.request.index: update.completion for update in updates}
    return [done[place] for place in sorted(done)]


def ids_of(found: list[RowCompletion]) -> list[list[int]]:
    return [each.token_ids for each in found]


@pytest.mark.parametrize(("rule", "temperature"), [("speculative", 0.0), ("block", 0.0), ("coupled", 0.8)])
@pytest.mark.parametrize("kind", ["model", "overlapped"])
def test_a_text_that_no_draft_changes_is_the_same_with_any_number(rule: str, temperature: float, kind: str) -> None:
    found = decoded(kind=kind, rule_name=rule, temperature=temperature)
    assert ids_of(found) == ids_of(decoded(kind="none", rule_name=rule, temperature=temperature))
    assert sum(found[0].accepted_lengths) > 10


def test_rows_accept_no_more_than_they_take_and_count_no_more_as_examined() -> None:
    for each, most in zip(decoded(), ROWS, strict=True):
        taken = each.request.max_new_tokens if most is None else most
        assert max(each.accepted_lengths) <= max(each.examined_lengths) <= taken
        assert most == 0 or max(each.accepted_lengths) == min(taken, 4)


@pytest.mark.heavy
def test_a_row_depends_on_no_other_one_and_on_no_executor() -> None:
    wanted = ids_of(decoded())
    for options in ({"batch_size": 1}, {"batch_size": 2, "replay": False}, {"batch_size": 3, "replay": WatchedGraphs}):
        assert ids_of(decoded(**options)) == wanted
    assert ids_of(decoded((None,) * 5))[0] == wanted[0]


def test_without_a_row_that_takes_any_nothing_is_drafted() -> None:
    alone = decoded((0, 0))
    assert not any(any(each.draft_lengths) for each in alone)
    assert alone[0].token_ids == decoded((0, None))[0].token_ids

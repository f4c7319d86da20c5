"""Rounds whose K changes: their text is the target's whatever is chosen, and their costs are those of texts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import ScriptedLength, complete, ids_of, make_decoder, outcome
from tests.helpers.lanes import first, heavy, pairs
from tests.helpers.models import build_checkpoint
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import FakeRecorder

REQUESTS = [
    Request(index=index, prompt_ids=ids, max_new_tokens=tokens)
    for index, (ids, tokens) in enumerate([((2, 3), 90), ((4, 4, 4), 31), ((5, 6, 7), 12), ((1,), 20)])
]


def test_a_round_that_is_timed_reads_about_as_many_experts_as_one_of_a_text(tmp_path: Path) -> None:
    """Equal tokens would choose alike, and K that do not pay would seem cheap."""
    build_checkpoint(tmp_path / "target", "mixtral", num_local_experts=8, num_hidden_layers=6)
    build_checkpoint(tmp_path / "draft", "llama")
    target, draft = (load_model(Loading(inspect(tmp_path / name))) for name in ("target", "draft"))
    decoder = make_decoder(target, draft, num_draft_tokens=8, temperature=0.8)
    with torch.inference_mode():
        decoder.make_room(REQUESTS)
        decoder.time_rounds([DraftChoice(8)], num_slots=20)
    assert target.experts_read_3 is not None
    num_read, num_expected, _ = target.experts_read_3.tolist()
    assert 0.6 < num_read / num_expected < 1.1


SCRIPTS = {
    "lengths": [DraftChoice(4), DraftChoice(1), DraftChoice(3), DraftChoice(2), DraftChoice(4)],
    "pauses": [*[DraftChoice(0)] * 7, DraftChoice(3), DraftChoice(4)],
    "a long pause": [*[DraftChoice(0)] * 70, DraftChoice(4), DraftChoice(2), DraftChoice(4)],
    "two drafters": [DraftChoice(4), DraftChoice(2, 1), DraftChoice(4, 1), DraftChoice(1), DraftChoice(0)],
}


def texts(script: Sequence[DraftChoice], *, draft_seed: int = 0, reads_late: bool = False, **options: Any) -> list[Any]:
    options = {"temperature": 0.9, "batch_size": 2, "num_draft_tokens": 4, "ngram": True} | options
    decoder = make_decoder(PrefixRunner(), PrefixRunner(seed=draft_seed), **options)
    decoder.length = ScriptedLength(script, reads_late=reads_late)
    return complete(decoder, REQUESTS)


@pytest.mark.parametrize("rule_name", ["speculative", "block"])
def test_rounds_with_a_row_whose_text_depends_on_k_draft_the_most(rule_name: str) -> None:
    """Its text is that of a run of this one K; rows after it are drafted for as is chosen."""
    how: dict[str, Any] = {"temperature": 0.9, "rule_name": rule_name, "num_draft_tokens": 4}
    asked = [replace(REQUESTS[1], keeps_lengths=True), replace(REQUESTS[0], index=0)]
    chosen = make_decoder(PrefixRunner(), PrefixRunner(seed=1), **how)
    chosen.length = ScriptedLength([DraftChoice(number) for number in (1, 0, 4, 2)])
    kept, other = sorted(complete(chosen, asked), key=lambda done: not done.request.keeps_lengths)
    fixed = complete(make_decoder(PrefixRunner(), PrefixRunner(seed=1), **how), asked[:1])
    assert kept.token_ids == fixed[0].token_ids
    assert {*kept.draft_lengths} == {4}
    assert {0, 1} <= {*other.draft_lengths}


@pairs(name=["lengths", "pauses", "a long pause"], reads_late=[False, True])
def test_a_draft_that_is_the_target_is_always_accepted_whatever_was_skipped(name: str, reads_late: bool) -> None:
    """A drafter that had not read what it skipped would draft from another text than the target's."""
    for done in texts(SCRIPTS[name], ngram=False, reads_late=reads_late):
        assert done.accepted_lengths[:-1] == done.draft_lengths[:-1]


@pytest.mark.seconds
@pytest.mark.parametrize("replay", [True, heavy(False), FakeRecorder()], ids=["traced", "eager", "recorded"])
@pytest.mark.parametrize("name", first(SCRIPTS, num=2))
def test_greedy_text_and_coupled_text_do_not_depend_on_the_choices(name: str, replay: Any) -> None:
    for options in ({"temperature": 0.0}, {"rule_name": "coupled"}):
        alone = make_decoder(PrefixRunner(), None, batch_size=2, **({"temperature": 0.9} | options))
        expected = ids_of(complete(alone, REQUESTS))
        assert ids_of(texts(SCRIPTS[name], draft_seed=1, replay=replay, **options)) == expected


@pytest.mark.seconds
@pytest.mark.parametrize("name", first(SCRIPTS, num=2))
def test_executors_agree_on_sampled_text(name: str) -> None:
    eager, traced, recorded = (
        outcome(texts(SCRIPTS[name], draft_seed=1, replay=replay)) for replay in (False, True, FakeRecorder())
    )
    assert eager == traced == recorded


@pytest.mark.seconds
@pytest.mark.parametrize("name", first(SCRIPTS, num=2))
def test_a_drafter_that_reads_prompts_late_drafts_the_same(name: str) -> None:
    """Two drafters share what is known of their caches, and later prompts begin like earlier ones."""
    at_once, late = (outcome(texts(SCRIPTS[name], draft_seed=1, reads_late=each)) for each in (False, True))
    assert at_once == late

"""Drafts that end before K tokens: the same texts whatever computes them, and rounds that verify no more than counts.

Shapes: B sequences, K drafted tokens, T positions of a forward.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.decoding import run_config
from llama_ssp.catalogue import ModelConfig
from llama_ssp.settings.drafters import ModelDraftConfig
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DraftPlacement,
    PlacementConfig,
    SamplingConfig,
    SpeculationConfig,
    VerificationConfig,
)
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.round import Round
from tests.helpers.decoders import complete, ids_of, make_decoder, outcome, requests
from tests.helpers.kinds import near_pair
from tests.helpers.lanes import heavy
from tests.helpers.layouts import ALONE, LAYOUTS, texts_of_ranks
from tests.helpers.recorded import WatchedGraphs

K = 4


@dataclass(kw_only=True)
class EndingConfig(ModelDraftConfig):
    """A draft whose drafts end early."""

    @property
    def ends_early(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelDrafter, "_num_counted", lambda _self, _read, ids_BK: num_counted(ids_BK), raising=False)


def num_counted(ids_BK: Tensor) -> Tensor:
    """A draft ends after its first token that 3 divides."""
    goes_on_BK = torch.cat([torch.ones_like(ids_BK[:, :1]), (ids_BK[:, :-1] % 3 > 0).long()], dim=1)
    num_B1 = goes_on_BK.cumprod(1).sum(1, keepdim=True)
    return num_B1.masked_fill(num_B1 == ids_BK.shape[1], 2**31)


def decoded(**options: Any) -> tuple[list[RowCompletion], Counter[int]]:
    """Texts, and how many forwards of the target read how many tokens of each row."""
    target, draft = near_pair(1.0)
    decoder = make_decoder(target, draft, num_draft_tokens=K, **{"temperature": 0.9} | options)
    read, forward = Counter[int](), target.forward

    def counting(ids_BT: Tensor, *tensors: Tensor, **how: Any) -> Tensor:
        read[ids_BT.shape[1]] += how.get("score_positions_BR") is None
        return forward(ids_BT, *tensors, **how)

    target.forward = counting  # type: ignore[method-assign]
    return complete(decoder, requests()), +read


@pytest.mark.seconds
@pytest.mark.parametrize("rule_name", ["speculative", heavy("block"), heavy("coupled")])
def test_a_text_is_the_same_whatever_computes_it(rule_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of any size, launched, traced and as graphs, and in rounds that verify all K tokens."""
    how: dict[str, Any] = {"rule_name": rule_name}
    wanted, read = decoded(**how, replay=False)
    lengths = [number for done in wanted for number in done.draft_lengths]
    assert {*lengths} == {1, 2, 3, K}
    assert sum(sum(done.accepted_lengths) for done in wanted) > len(lengths) / 2
    assert {*read} == ({K + 1} if rule_name == "block" else {number + 1 for number in lengths})
    for other in ({"replay": True}, {"batch_size": 3, "replay": False}, {"batch_size": 2, "replay": WatchedGraphs}):
        assert outcome(decoded(**how, **other)[0]) == outcome(wanted)
    monkeypatch.setattr(Round, "may_shorten", False)
    found, read = decoded(**how, batch_size=2, replay=False)
    assert outcome(found) == outcome(wanted)
    assert {*read} == {K + 1}


def test_greedy_text_is_plain_text() -> None:
    plain = ids_of(complete(make_decoder(near_pair(1.0)[0], None, temperature=0.0), requests()))
    for size in (1, 3):
        assert ids_of(decoded(temperature=0.0, batch_size=size)[0]) == plain


@pytest.mark.seconds
@pytest.mark.parametrize("rule", ["speculative", heavy("block")])
@pytest.mark.parametrize("layout", [LAYOUTS[place] for place in (2, 4, 6)])
def test_ranks_agree_where_drafts_end(layout: Layout, rule: str) -> None:
    placement = PlacementConfig(draft=DraftPlacement(kind=layout.draft_kind))
    config = replace(
        run_config(ModelConfig(name="target"), None, placement=placement),
        draft=EndingConfig(kind=MODEL_DRAFT, model=ModelConfig(name="draft")),
        batch_size=3,
        ignore_eos=False,
        sampling=SamplingConfig(temperature=0.8),
        verification=VerificationConfig(rule=rule),
        speculation=SpeculationConfig(num_draft_tokens=K),
    )
    alone = replace(config, placement=PlacementConfig())
    [wanted] = texts_of_ranks(ALONE, alone, requests())
    assert texts_of_ranks(layout, config, requests()) == [wanted] * len(layout.ranks)

"""Groups of rows that follow each other through the stages of a target: texts are those of one group."""

from typing import Any

import pytest
import torch

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from tests.helpers.decoders import complete, make_decoder, parts_of, requests_of
from tests.helpers.lanes import pairs
from tests.helpers.layered_tables import LayeredTables
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import WatchedGraphs
from tests.helpers.round_laws import Rounds

PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 1, 2), (3, 3), (9, 1))
NUM_NEW = 11


class CountingRunner(PrefixRunner):
    """Counts the rows of each forward of a round."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows: list[int] = []

    def forward(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, **how: object) -> torch.Tensor:
        if how.get("score_positions_BR") is None:
            self.num_rows.append(len(ids_BT))
        return super().forward(ids_BT, positions_BT, **how)  # type: ignore[arg-type]


@pairs(
    shape=[None, "2x2x1", "dynamic-7x3x3"],
    num_groups=[2, 3, 9],
    temperature=[0.0, 0.9],
    drafts=[True, False],
    where=lambda shape, drafts, **_: drafts or shape is None,
)
def test_texts_are_those_of_one_group(shape: str | None, num_groups: int, temperature: float, drafts: bool) -> None:
    found = []
    for number in (1, num_groups):
        target, draft = CountingRunner(), PrefixRunner(seed=1) if drafts else None
        decoder = make_decoder(target, draft, temperature=temperature, batch_size=4, tree=shape, replay=False)
        decoder.round.num_groups = number
        completions = complete(decoder, requests_of(PROMPTS, NUM_NEW))
        found.append([(each.token_ids, each.accepted_lengths) for each in completions])
        assert max(target.num_rows) == -(-4 // min(number, 4)), "rows of a forward"
    assert found[0] == found[1]


@pytest.mark.parametrize("replay", [True, WatchedGraphs])
def test_rounds_in_groups_are_replayed(replay: type[WatchedGraphs] | bool) -> None:
    found = []
    for number in (1, 3):
        target, draft = PrefixRunner(), PrefixRunner(seed=1)
        decoder = make_decoder(target, draft, temperature=0.9, batch_size=4, replay=replay)
        decoder.round.num_groups = number
        found.append([each.token_ids for each in complete(decoder, requests_of(PROMPTS[:4], 7))])
    assert found[0] == found[1]


class InGroups:
    """A target whose rounds score the rows of a batch in groups, as `Rounds` keeps the rows of a model."""

    def __init__(self, target: LayeredTables, num_groups: int) -> None:
        self._round, self.cache = make_decoder(target, target).round, target.cache  # type: ignore[arg-type]
        self._round.num_groups = num_groups

    def forward(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, *, bucket: int) -> torch.Tensor:
        num_rows, num_tokens = ids_BT.shape
        lengths_B, tokens_BS = positions_BT[:, 0] + 1, ids_BT.new_zeros(num_rows, bucket)
        state = BatchState.empty(num_rows, num_slots=bucket, num_rounds=1, table=self._round.uniforms)
        state = state._replace(tokens_BS=tokens_BS.scatter(1, positions_BT, ids_BT), lengths_B=lengths_B)
        return self._round.score(state, num_drafted=num_tokens - 1, bucket=bucket)


@pairs(rule_name=["speculative", "block"], num_drafted=[1, 2], num_groups=[2, 3])
def test_texts_of_several_rounds_have_the_law_of_the_target(rule_name: str, num_drafted: int, num_groups: int) -> None:
    vocab_size, num_rounds = (3, 3) if num_drafted == 1 else (2, 2)
    draft = LayeredTables(vocab_size=vocab_size, num_layers=1, seed=5)

    def make(target: LayeredTables, rule: Rule, *, batch_size: int, num_slots: int) -> Any:
        target.allocate(batch_size=batch_size, capacity=num_slots)
        parts = parts_of(draft, rule=rule, num_draft_tokens=num_drafted, vocab_size=vocab_size)
        drafter = ModelDrafter(parts)
        drafter.allocate(batch_size=batch_size, num_slots=num_slots)
        return drafter, [InGroups(target, num_groups), draft]

    sampling = SamplingConfig(temperature=0.8)
    rule = make_rule(sampling, VerificationConfig(rule=rule_name))
    rounds = Rounds(LayeredTables(vocab_size=vocab_size), rule, make, num_drafted=num_drafted)
    assert rounds.error((1, 0, 1, 1), num_rounds=num_rounds, process=processor(sampling)) < 1e-12

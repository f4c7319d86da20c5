"""Rows that outgrow the context of their draft go on plainly: the same law and seeds, whatever else is in the batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llama_ssp.speculate.drafters.limited import LimitedDrafter
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.rules import Rule
from llama_ssp.speculate.sampling.trees import Tree
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.kinds import near_pair
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.recorded import WatchedGraphs

CONTEXT, K = 24, 3
CPU = torch.device("cpu")
LENGTHS = (3, 9, 22, 23, 40, 1)
"""Of prompts: the draft serves some of them to the end, some for a while, and others never."""


class Short(PrefixRunner):
    """A model that fails beyond its context, as one with a table of positions does."""

    def forward(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, **named: Any) -> torch.Tensor:  # noqa: ANN401
        assert positions_BT.is_meta or int(positions_BT.max()) < CONTEXT
        return super().forward(ids_BT, positions_BT, **named)


def decoded(
    shape: str | None = None, *, temperature: float = 0.9, batch_size: int = 1, replay: Any = False,  # noqa: ANN401
    sharpness: float = 1.0, drafts: bool = True, num_new: int = 20, lengths: Sequence[int] = LENGTHS,
) -> list[RowCompletion]:  # fmt: skip
    target, near = near_pair(sharpness)
    draft = Short(sharpness=sharpness)
    draft.head = near.head
    tree = Tree.of(shape, CPU) if shape else None
    number = tree.num_drafted if tree else K

    def make(rule: Rule) -> LimitedDrafter:
        inner = ModelDrafter(draft, rule=rule, num_draft_tokens=number, vocab_size=target.vocab_size, tree=tree)
        return LimitedDrafter(inner, CONTEXT, depth=tree.depth if tree else None, device=CPU)

    decoder = make_decoder(
        target, None, temperature=temperature, batch_size=batch_size, num_draft_tokens=number, tree=tree,
        replay=replay, make_drafter=make if drafts else None,
    )  # fmt: skip
    prompts = [tuple((7 * place + number) % 11 for place in range(length)) for number, length in enumerate(lengths)]
    return complete(decoder, [
        Request(index=index, prompt_ids=ids, max_new_tokens=num_new) for index, ids in enumerate(prompts)
    ])  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("shape", [None, "2x2x1", "dynamic-7x3x3"])
def test_greedy_text_is_plain_text(shape: str | None, batch_size: int) -> None:
    plain = [each.token_ids for each in decoded(drafts=False, temperature=0.0)]
    found = decoded(shape, temperature=0.0, batch_size=batch_size)
    assert [each.token_ids for each in found] == plain


@pytest.mark.parametrize("shape", [None, "2x2x1"])
def test_a_sampled_text_depends_on_no_other_row_and_no_executor(shape: str | None) -> None:
    wanted = [each.token_ids for each in decoded(shape)]
    for options in ({"batch_size": 4}, {"batch_size": 4, "replay": True}, {"batch_size": 3, "replay": WatchedGraphs}):
        assert [each.token_ids for each in decoded(shape, **options)] == wanted


def test_beyond_the_draft_tokens_are_those_of_plain_decoding_and_count_in_no_rate() -> None:
    plain = decoded(drafts=False, lengths=(CONTEXT - K + 1, CONTEXT - K + 2), num_new=30)
    within, beyond = decoded(lengths=(CONTEXT - K + 1, CONTEXT - K + 2), num_new=30)
    assert beyond.token_ids == plain[1].token_ids
    assert not any(beyond.draft_lengths)
    assert within.draft_lengths[0] == 0, "its first token, after the prompt, is the last one within"
    shorter = decoded(lengths=(CONTEXT - K,), num_new=30)[0]
    assert (shorter.draft_lengths[0], sum(shorter.draft_lengths[1:])) == (K, 0)
    assert shorter.examined_lengths[1:] == [0] * (len(shorter.draft_lengths) - 1)

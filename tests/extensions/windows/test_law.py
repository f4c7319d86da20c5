"""The law of drafts of a model that sees a window, and of texts after several rounds of them, to 1e-12.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llama_ssp.extensions.windows.drafter import Windowed
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from tests.helpers.decoders import parts_of
from tests.helpers.lanes import pairs
from tests.helpers.layered_tables import LayeredTables
from tests.helpers.round_laws import Rounds

SAMPLING = SamplingConfig(temperature=0.8)
WAYS = {"window and sinks": (4, 1), "window": (5, 0)}
LONG, SHORT = (1, 0, 1, 1, 0, 0, 1, 0, 1), (1, 0, 1, 1)
"""Texts beyond a window and its first tokens, and within them: rounds go on across the edge."""


class OfRounds:
    """A draft over its window, as `Rounds` keeps the rows of a model: with what each row has skipped."""

    def __init__(self, windowed: Windowed, draft: LayeredTables) -> None:
        self._windowed, self._draft, self.cache = windowed, draft, self

    def in_rows(self) -> Iterator[Tensor]:
        yield from self._draft.cache.in_rows()
        yield self._windowed._tables.skipped_B1[None]

    def forward(self, ids_BT: Tensor, _positions_BT: Tensor, **_how: Any) -> None:
        """Read a prompt."""
        lengths_B = torch.full((len(ids_BT),), ids_BT.shape[1])
        rows_B = torch.arange(len(ids_BT))
        for positions_BT in self._windowed.ends(lengths_B, longest=ids_BT.shape[1], rows_R=rows_B):
            self._windowed.forward(ids_BT.gather(1, positions_BT), positions_BT, cache_rows_B=rows_B, begins=True)


def rounds_of(way: str, rule_name: str, draft: LayeredTables, *, num_drafted: int) -> Rounds:
    window, sinks = WAYS[way]

    def make(target: LayeredTables, rule: Rule, *, batch_size: int, num_slots: int) -> Any:
        sizes: dict[str, Any] = {"num_draft_tokens": num_drafted, "vocab_size": target.vocab_size}
        target.allocate(batch_size=batch_size, capacity=num_slots)
        windowed = Windowed(draft, sinks=sinks, window=window, most_nodes=num_drafted)
        drafter = ModelDrafter(replace(parts_of(draft, rule=rule, **sizes), runner=windowed))
        drafter.allocate(batch_size=batch_size, num_slots=num_slots)
        return drafter, [target, OfRounds(windowed, draft)]

    rule = make_rule(SAMPLING, VerificationConfig(rule=rule_name))
    return Rounds(LayeredTables(vocab_size=draft.vocab_size), rule, make, num_drafted=num_drafted)


def law_after(
    draft: LayeredTables, way: str, prompt: Sequence[int], text: Sequence[int], drafted: Sequence[int]
) -> Tensor:
    """The law (V,) behind a text and drafted tokens, of a layer whose keys do not depend on what it saw before."""
    window, sinks = WAYS[way]
    _, held = draft.read(text[:-2], range(len(text) - 2))
    skipped = range(sinks, max(sinks, len(prompt) - window, len(text) - 2 - window))
    kept = [place for place in range(len(text) - 2) if place not in skipped]
    seen = [(keys_TD[kept], values_TD[kept]) for keys_TD, values_TD in held]
    logits_TV, _ = draft.read([*text[-2:], *drafted], range(len(text) - 2, len(text) + len(drafted)), seen)
    law_V: Tensor = processor(SAMPLING)(logits_TV[-1:])[0]
    return law_V


@pairs(way=[*WAYS], rule_name=["speculative", "block"], num_drafted=[1, 2, 3], text=[LONG, SHORT])
def test_texts_of_several_rounds_have_the_law_of_the_target(
    way: str, rule_name: str, num_drafted: int, text: tuple[int, ...]
) -> None:
    """Whatever a round accepts, drafts have the law of what they see, and texts that of the target."""
    vocab_size, num_rounds = (3, 3) if num_drafted == 1 else (2, 2)
    draft = LayeredTables(vocab_size=vocab_size, num_layers=1, seed=5)
    rounds = rounds_of(way, rule_name, draft, num_drafted=num_drafted)
    assert rounds.error(text, num_rounds=num_rounds, process=processor(SAMPLING)) < 1e-12
    errors = [
        float((law_TV[step] - law_after(draft, way, text[:-1], found, ids[:step])).abs().max())
        for found, ids, law_TV in rounds.said
        for step in range(len(ids))
    ]
    assert max(errors) < 1e-12

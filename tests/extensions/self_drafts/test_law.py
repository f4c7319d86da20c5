"""The law of drafts of a window, of layers and of a copy, and of texts after several rounds of them, to 1e-12.

Shapes: B rows, K drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.self_drafts.drafter import SelfDrafter, _Window
from llama_ssp.extensions.self_drafts.records import SelfConfig, chosen_layers
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from tests.helpers.decoders import parts_of
from tests.helpers.lanes import pairs
from tests.helpers.layered_tables import LayeredTables
from tests.helpers.round_laws import Rounds

SAMPLING = SamplingConfig(temperature=0.8)
WAYS: dict[str, dict[str, Any]] = {
    "window and sinks": {"window": 4, "sinks": 1},
    "first layers": {"layers": 2},
    "some layers, window": {"window": 4, "sinks": 0, "layers": [0, 2]},
    "a copy in few bits": {"quantization": "int4_weight_only"},
    "a copy of some layers, window": {
        "quantization": "int4_weight_only",
        "layers": [0, 2],
        "window": 4,
        "sinks": 1,
    },
}
LONG, SHORT = (1, 0, 1, 1, 0, 0, 1, 0), (1, 0, 1, 1)
"""Texts beyond a window and its first tokens, and within them: rounds go on across the edge."""


def rounds_of(way: str, rule_name: str, *, num_drafted: int, vocab_size: int) -> Rounds:
    draft = SelfConfig(kind="self", **WAYS[way])
    target = LayeredTables(vocab_size=vocab_size)
    copied = target.rounded() if draft.quantization else None

    def make(target: LayeredTables, rule: Rule, *, batch_size: int, num_slots: int) -> Any:
        sizes: dict[str, Any] = {"num_draft_tokens": num_drafted, "vocab_size": vocab_size}
        target.allocate(batch_size=batch_size, capacity=num_slots)
        drafter = SelfDrafter(parts_of(target=target, config=draft, rule=rule, prepared=copied, **sizes))
        drafter.allocate(batch_size=batch_size, num_slots=num_slots)
        return drafter, [target]

    rule = make_rule(SAMPLING, VerificationConfig(rule=rule_name))
    return Rounds(target, rule, make, num_drafted=num_drafted)


def law_after(rounds: Rounds, way: str, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """The law (V,) behind a text and drafted tokens, of the layers over what they see of the keys of the whole."""
    draft, target = SelfConfig(kind="self", **WAYS[way]), rounds.target
    num_read = len(text) - 1
    _, held = target.read(text[:-1], range(num_read))
    kept = [*range(num_read)]
    if draft.window is not None:
        kept = kept[: draft.sinks] + kept[draft.sinks :][-draft.window :]
    part = target.part(chosen_layers(draft, 3), of=target.rounded() if draft.quantization else None)
    seen = [(keys_TD[kept], values_TD[kept]) for keys_TD, values_TD in held]
    logits_TV, _ = part.read([text[-1], *drafted], range(num_read, len(text) + len(drafted)), seen)
    law_V: Tensor = processor(SAMPLING)(logits_TV[-1:])[0]
    return law_V


def draft_errors(rounds: Rounds, way: str) -> list[float]:
    return [
        float((law_TV[step] - law_after(rounds, way, text, ids[:step])).abs().max())
        for text, ids, law_TV in rounds.said
        for step in range(len(ids))
    ]


@pytest.mark.seconds
@pairs(way=[*WAYS], rule_name=["speculative", "block"], num_drafted=[1, 2, 3], text=[LONG, SHORT])
def test_texts_of_several_rounds_have_the_law_of_the_target(
    way: str, rule_name: str, num_drafted: int, text: tuple[int, ...]
) -> None:
    """Whatever a round accepts, drafts have the law of what they see, and texts that of the whole target."""
    sizes = {1: (3, 3), 2: (2, 2), 3: (2, 2)}
    vocab_size, num_rounds = sizes[num_drafted]
    rounds = rounds_of(way, rule_name, num_drafted=num_drafted, vocab_size=vocab_size)
    assert rounds.error(text, num_rounds=num_rounds, process=processor(SAMPLING)) < 1e-12
    assert max(draft_errors(rounds, way)) < 1e-12


@pytest.mark.parametrize("way", ["some layers, window"])
def test_tokens_are_drawn_from_the_law_that_is_said(way: str) -> None:
    """After a round whose second token was rejected, by uniform numbers."""
    rounds = rounds_of(way, "speculative", num_drafted=2, vocab_size=3)
    texts = rounds.step(rounds.begin(LONG))
    rejected = texts.some((texts.lengths_B == len(LONG) + 2).nonzero()[:1, 0])
    rejected.law_B = torch.ones(1).double()
    along, _, _ = rounds.along(rejected)
    torch.testing.assert_close(rounds.drafted_law(rejected)[0], along.law_B, atol=1e-12, rtol=0)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_fault_of_the_small_cache_would_be_found(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is one token late changes drafts, and one that leaves a trace in the target's cache the text."""
    fill = _Window.fill

    def faulty(self: Any, lengths_B1: Tensor, rows_B: Tensor | None) -> Tensor:
        for layer in () if is_late else self._target.cache.in_rows():
            layer[:, :, 2] += 1.0
        return fill(self, lengths_B1 - int(is_late), rows_B)

    monkeypatch.setattr(_Window, "fill", faulty)
    rounds = rounds_of("window and sinks", "speculative", num_drafted=1, vocab_size=3)
    error = rounds.error(LONG, num_rounds=2, process=processor(SAMPLING))
    assert (max(draft_errors(rounds, "window and sinks")) if is_late else error) > 1e-3

"""Rows of every kind in one batch: what certain drafts and greedy rows may not change is the text of the row alone."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import ids_of
from tests.helpers.kinds import KINDS
from tests.unit.speculate.engine.test_some_rows import in_turn

BY_ROW = SamplingConfig(temperature=1.0, by_row=True)
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 2},
    {"min_p": 0.3},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.5},
    {"logit_bias": {3: 2.0}},
    {"bad_words": ((2,),)},
]
NUM_IDS, NUM_MIXES = 11, 12


def mixes(seed: int) -> Iterator[tuple[str, dict[str, Any], int, float, list[Request]]]:
    """A kind of draft, options of a decoder, rows that decode at a time, `reading_rows`, and requests."""
    chance = random.Random(seed)
    for _ in range(NUM_MIXES):
        rule, batch_size = chance.choice(["speculative", "block", "coupled"]), chance.choice([1, 2, 3, 6, 8, 8])
        temperatures = [0.5, 0.8, 1.2] if rule == "coupled" else [0.0]
        requests = [
            Request(
                index=index,
                prompt_ids=tuple(chance.randrange(NUM_IDS) for _ in range(chance.randint(1, 9))),
                max_new_tokens=chance.randint(2, 40),
                sampling=SamplingConfig(
                    temperature=chance.choice(temperatures), **chance.choice([{}, {}, chance.choice(SETTINGS)])
                ),
                seed=chance.randrange(5),
                num_draft_tokens=chance.choice([None, None, 0, 1, 2, 3, 9]),
            )
            for index in range(chance.randint(batch_size, 9))
        ]
        how = {
            "sampling": BY_ROW,
            "batch_size": batch_size,
            "rule_name": rule,
            "eos_ids": chance.choice([[], [4]]),
            "replay": chance.choice([False, False, False, True]),
        }
        kind = chance.choice([kind for kind in KINDS if kind != "none"])
        yield (
            kind,
            how,
            min(chance.choice([1, 5, 5, batch_size]), batch_size),
            chance.choice([0.0, 1.5, math.inf]),
            requests,
        )


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(8))
@torch.inference_mode()
def test_a_text_that_no_draft_changes_is_the_same_among_any_rows(seed: int) -> None:
    for kind, how, most, reading_rows, requests in mixes(seed):
        decoder, alone = KINDS[kind](1.0, **how), KINDS["none"](1.0, **how | {"batch_size": 1, "replay": False})
        decoder.reading_rows = reading_rows
        assert ids_of(in_turn(decoder, requests, most=most)) == ids_of(in_turn(alone, requests, most=1)), (kind, how)

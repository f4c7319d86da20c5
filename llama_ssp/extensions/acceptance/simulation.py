"""Runs the shipped `num_draft_tokens=auto` over finished texts, timed by the costs of a plan, with copies too.

A choice depends on what earlier rounds accepted, so accepted tokens are drawn, one sequence of rounds for all texts.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llama_ssp.extensions.acceptance.trace import Replay
from llama_ssp.speculate.engine.lengths import FixedLength
from llama_ssp.speculate.engine.round import DraftChoice


def auto_seconds(
    draft: str,
    replays: Sequence[Replay],
    costs: Sequence[Mapping[int, float]],
    *,
    make: Callable[..., FixedLength],
    lengths: Mapping[str, Sequence[int]],
    num_texts: int,
) -> float:
    """Return the seconds that the first texts take with `auto`, with a draft and perhaps its fallback.

    Args:
        draft: name of the draft.
        replays: replays of the same texts by the draft, and by its fallback if there is one.
        costs: for each replay, the seconds of rounds by K; key 0 is a plain step.
        make: `LengthChooser.simulate` of the chooser's record.
        lengths: the K that the chooser has, by draft; a K without a cost is left out.
        num_texts: how many of the texts to count, from the first one on.
    """
    rounds = {DraftChoice(0): costs[0][0]} | {
        DraftChoice(number, source): cost[number]
        for source, cost in enumerate(costs)
        for number in lengths[draft]
        if number in cost
    }
    expected = [replay.by_position(1)[0] for replay in replays]
    chooser = make(rounds, acceptance=expected)
    generator, seconds = np.random.default_rng(0), 0.0
    for text, length in enumerate(replays[0].lengths_B[:num_texts]):
        left = int(length) - 1
        while left:
            choice = chooser.choose([0] * len(replays))
            most = min(choice.num_tokens, left - 1)
            reach_K = replays[choice.source].reach_BTD[text, left, 1 : most + 1]
            accepted = int((reach_K > generator.random()).sum())
            if choice.num_tokens < left:  # others say nothing of what the end cuts off
                chooser.observe(choice, [accepted])
            seconds += rounds[choice]
            left -= accepted + 1
    return seconds

"""Runs the shipped `num_draft_tokens=auto` over finished texts, timed by the costs of a plan, with copies too.

Its choices read what rounds before have accepted, so one course of its rounds is drawn, text after text.
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
    """Seconds of the first texts of replays, of a draft and then of its fallback, with the draft's `auto`.

    Args:
        draft: its name.
        replays: of the same texts.
        costs: for each replay, seconds of a plain step, 0, and of rounds by K.
        make: of its record, `LengthChooser.simulate`.
        lengths: the K that it chooses from, by draft; a K without a cost is left out.
        num_texts: of these texts, from the first one on.
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

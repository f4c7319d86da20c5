"""Served samples are draws from the target's law under their request's settings, whatever is served next to them."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp import Pair
from llama_ssp.evaluation.martingales import SCORES, Role, Sum, TextSums, sums_of
from llama_ssp.run.serve.inbox import ENDED, Inbox, Part
from llama_ssp.run.serve.protocol import BodyReader
from llama_ssp.run.serve.settings import ServeConfig
from llama_ssp.run.tasks.probabilities import SampledText, Scorer, _drafter
from llama_ssp.speculate.engine.likelihoods import log_probs_of
from llama_ssp.speculate.sampling import rules
from llama_ssp.speculate.sampling.by_row import ByRow
from tests.helpers.law_faults import biased
from tests.helpers.served import run, session_of

PROMPT, NUM_TOKENS, NUM_SAMPLES, NUM_ROWS = "def factorial(n):\n", 12, 8, 8
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9}, {"temperature": 1.3},
    {"temperature": 0.9, "frequency_penalty": 0.5}, {"temperature": 0},
]  # fmt: skip
LEAST_P = 1e-3 / len(SCORES)


def sums_of_served(pair: Pair) -> dict[str, Sum]:
    """Serve samples of all settings at the same time, those of one next to those of others, and score the texts."""
    session, inbox = session_of(pair, batch_size=NUM_ROWS, task=ServeConfig()), Inbox(10_000)
    models = pair.models
    reader = BodyReader(session.config, models.request_maker, length=models.context)
    asked = [
        reader.read(
            {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "seed": seed, "ignore_eos": True, **sampling}, is_chat=False
        )
        for seed in range(NUM_SAMPLES)
        for sampling in SAMPLINGS
    ]

    def taker(answer: Any) -> Callable[[int, Part], None]:  # noqa: ANN401
        def take(_place: int, part: Part) -> None:
            assert part.finish_reason != ENDED
            answer.push(part)

        return take

    for one in asked:
        inbox.put(one.completions, taker(one.answers[0]))
    inbox.is_closed = True
    run(session, inbox)

    sums: list[TextSums] = []
    for place, sampling in enumerate(SAMPLINGS):
        if not sampling["temperature"]:
            continue
        answers = [one.answers[0] for one in asked[place :: len(SAMPLINGS)]]
        config = replace(session.config, sampling=replace(session.config.sampling, **sampling))
        drafter = _drafter(SimpleNamespace(models=models, config=config), None)  # type: ignore[arg-type]
        longest = len(answers[0].prompt_ids) + NUM_TOKENS
        with torch.inference_mode():
            scorer = Scorer(
                models.target, log_probs_of(config.sampling), batch_size=NUM_SAMPLES, longest=longest, num_positions=8,
                drafter=drafter,
            )  # fmt: skip
            texts = [
                SampledText(
                    prompt_ids=tuple(answer.prompt_ids), token_ids=tuple(answer.token_ids),
                    roles=(Role.unused, *[Role.other] * (NUM_TOKENS - 1)),
                ) for answer in answers
            ]  # fmt: skip
            sums += [score.sums for batch in scorer.score(texts) for score in batch if score.sums]
    assert len(sums) == NUM_SAMPLES * (len(SAMPLINGS) - 1)
    return sums_of(sums)


def test_served_samples_have_the_law_of_their_requests(pair: Pair) -> None:
    """A false alarm has a probability below 0.001; seeds are fixed."""
    sums = sums_of_served(pair)
    assert min(found.p_value for found in sums.values()) > LEAST_P
    assert all(abs(found.z) < 4.5 for found in sums.values())
    assert sum(found.z**2 for found in sums.values()) > 1


LAW = ByRow.__call__


def hot(by_row: ByRow, logits_BTV: torch.Tensor, context: Any) -> torch.Tensor:  # noqa: ANN401
    """The first row has twice its temperature."""
    sampling_BX = context.sampling_BX.clone()
    sampling_BX[0, 0] /= 2
    return LAW(by_row, logits_BTV, context._replace(sampling_BX=sampling_BX))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["the draft's law", "a temperature of one row"])
def test_another_law_is_found_out(pair: Pair, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "the draft's law":
        monkeypatch.setattr(rules, "verify_speculative", biased(0.0)(rules.verify_speculative))
    else:
        monkeypatch.setattr(ByRow, "__call__", hot)
    sums = sums_of_served(pair)
    assert min(found.p_value for found in sums.values()) < LEAST_P

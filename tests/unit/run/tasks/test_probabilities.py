"""The target's log-probabilities of finished texts are those of its definition."""

import pytest
import torch

from llama_ssp.run.tasks.probabilities import SampledText, Scorer, log_probs_of
from llama_ssp.settings.schema import SamplingConfig
from tests.helpers.lanes import grid
from tests.helpers.prefix_runner import PrefixRunner

PROMPT = (3, 1, 4)
TEXTS = [(5,), (1, 5, 9), (2, 6, 5, 3, 5, 8, 9), (7, 9), (3, 2, 3, 8, 4)]
SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0),
    "sampled": SamplingConfig(temperature=0.7, top_k=6),
    "penalized": SamplingConfig(temperature=1.3, repetition_penalty=1.5, presence_penalty=0.3),
}


def expected(runner: PrefixRunner, token_ids: tuple[int, ...], sampling: SamplingConfig) -> list[float]:
    """One token after the other, from the whole prefix."""
    found = []
    for place, token in enumerate(token_ids):
        ids = [*PROMPT, *token_ids[:place]]
        logits = runner.logits(ids).double()
        for known in set(ids):
            if sampling.penalizes:
                scaled = logits[known] * 1.5 if logits[known] < 0 else logits[known] / 1.5
                logits[known] = scaled - 0.3
        logits = logits / (sampling.temperature or 1)
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
        found.append(max(float(logits.log_softmax(-1)[token]), float(torch.tensor(1e-30).log())))
    return found


@grid(batch_size=(1, 2, 7), num_positions=(1, 3, 9), sampling=tuple(SAMPLINGS.values()))
def test_every_token_has_its_log_probability(batch_size: int, num_positions: int, sampling: SamplingConfig) -> None:
    runner = PrefixRunner()
    scorer = Scorer(runner, log_probs_of(sampling), batch_size=batch_size, longest=10, num_positions=num_positions)
    texts = [SampledText(prompt_ids=PROMPT, token_ids=ids) for ids in TEXTS]
    with torch.inference_mode():
        found = [each.log_probs for batch in scorer.score(texts) for each in batch]
    assert [len(row) for row in found] == [len(ids) for ids in TEXTS]
    for row, ids in zip(found, TEXTS, strict=True):
        assert row == pytest.approx(expected(runner, ids, sampling), abs=1e-4)


def test_a_prompt_is_read_once_for_all_its_texts() -> None:
    runner = PrefixRunner()
    scorer = Scorer(runner, log_probs_of(SAMPLINGS["greedy"]), batch_size=1, longest=10, num_positions=9)
    with torch.inference_mode():
        list(scorer.score([SampledText(prompt_ids=PROMPT, token_ids=(1, 2))] * 5))
    assert runner.num_forwards == 1 + 5

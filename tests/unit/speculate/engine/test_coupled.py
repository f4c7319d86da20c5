"""Under `coupled` a seed has one text: no draft, any draft, any K and any batch give the same one."""

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.uniforms import exponentials
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.draws import keys_of
from tests.helpers.kinds import Make, kinds
from tests.helpers.prefix_runner import PrefixRunner

SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.9),
    "penalized": SamplingConfig(temperature=1.2, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.2),
}
REQUESTS = [
    Request(index=index, sample=sample, prompt_ids=ids, max_new_tokens=20)
    for index, ids in enumerate([(2, 3), (4, 4, 4), (5, 6, 7)])
    for sample in range(2)
]
DRAFTS: list[dict[str, Any]] = [
    {"draft": PrefixRunner(), "num_draft_tokens": 4},
    {"draft": PrefixRunner(seed=1), "num_draft_tokens": 1},
    {"draft": PrefixRunner(seed=1), "num_draft_tokens": 8, "batch_size": 5},
]


def texts(sampling: SamplingConfig, *, draft: PrefixRunner | None = None, **options: Any) -> dict[Request, list[int]]:
    decoder = make_decoder(PrefixRunner(), draft, sampling=sampling, rule_name="coupled", **options)
    return {done.request: list(done.token_ids) for done in complete(decoder, REQUESTS)}


@pytest.mark.seconds
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_seed_has_one_text_whatever_drafts(name: str) -> None:
    alone = texts(SAMPLINGS[name])
    assert len({tuple(text) for text in alone.values()}) == len(REQUESTS), "samples differ"
    for options in DRAFTS:
        assert texts(SAMPLINGS[name], **options) == alone, options


@pytest.mark.seconds
@kinds
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_seed_has_one_text_in_rounds_of_every_kind(make: Make, name: str) -> None:
    alone = texts(SAMPLINGS[name])
    for options in ({}, {"batch_size": 5}, {"replay": False}):
        made = make(3.0, sampling=SAMPLINGS[name], rule_name="coupled", **options)
        assert {done.request: done.token_ids for done in complete(made, REQUESTS)} == alone


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    decoder = make_decoder(PrefixRunner(), PrefixRunner(), sampling=SAMPLINGS["temperature"], rule_name="coupled")
    for done in complete(decoder, REQUESTS):
        assert set(done.accepted_lengths[:-1]) == {3}


def test_every_token_is_the_best_of_probability_over_its_own_number() -> None:
    sampling, runner = SAMPLINGS["temperature"], PrefixRunner()
    process = processor(sampling)
    for request, ids in texts(sampling, draft=PrefixRunner(seed=1)).items():
        keys_B = torch.tensor([request.key(7)])
        text = [*request.prompt_ids, *ids]
        for position in range(len(request.prompt_ids), len(text)):
            probs_V = process(runner.logits(text[:position])[None, None])[0, 0]
            numbers_V = exponentials(keys_B, torch.tensor([[position - 1]]), vocab_size=runner.vocab_size)[0, 0]
            assert int((probs_V / numbers_V).argmax()) == text[position]


def test_the_numbers_of_a_race_are_positive_and_as_fine_as_fp64_near_zero() -> None:
    keys_B = keys_of(range(1000), seed=5)
    numbers = exponentials(keys_B, torch.arange(4).expand(1000, -1), vocab_size=500)
    assert bool((numbers > 0).all())
    small = numbers[numbers < 1e-4].double()
    steps = small / 2.0**-24
    assert len(small) > 100
    assert float((steps - steps.round()).abs().max()) > 0.1, "as coarse as fp32"


@pytest.mark.seconds
def test_the_winner_of_a_race_has_the_law_of_the_probabilities() -> None:
    """A false alarm has a chance of 1 in 10 000; a law that is off by 2 % of a token's share is missed in 1 of 100."""
    probs_V = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    num_rows = 200_000
    keys_B = keys_of(range(num_rows), seed=3)
    context = Context(torch.zeros(num_rows, 1).long(), keys_B, keys_B, torch.full((num_rows, 1), 9))
    numbers_BV = exponentials(context.keys_B, context.last_BT, vocab_size=5)[:, 0]
    counts = Counter((probs_V / numbers_BV).argmax(-1).tolist())
    found = chisquare([counts[token] for token in range(5)], [num_rows * float(prob) for prob in probs_V])
    assert found.pvalue > 1e-4

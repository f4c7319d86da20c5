"""The shipped pair through the whole engine: the same text in every batch, and the law of the target."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from llama_ssp import Pair, catalogue
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.requests import encode
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights import hub
from tests.helpers.lanes import slow
from tests.helpers.prompts import PROMPTS
from tests.helpers.texts import few_part


@torch.inference_mode()
def decode(
    pair: Pair, requests: list[Request], *, temperature: float, batch_size: int
) -> dict[tuple[int, int], list[int]]:
    """Ids by (prompt, sample)."""
    config = replace(pair.config, sampling=SamplingConfig(temperature=temperature), batch_size=batch_size, seed=5)
    done = {}
    for updates in build_decoder(pair.models, config, speculative=True).run(requests):
        for update in updates:
            request = update.completion.request
            done[request.index, request.sample] = update.completion.token_ids
    return done


@pytest.mark.parametrize("temperature", [slow(0.0), slow(0.8)])
def test_a_batch_of_eight_gives_each_prompt_the_text_that_it_has_alone(pair: Pair, temperature: float) -> None:
    requests = [
        Request(index=index, prompt_ids=encode(prompt, pair.models.tokenizer), max_new_tokens=20)
        for index, prompt in enumerate(PROMPTS)
    ]
    alone = decode(pair, requests, temperature=temperature, batch_size=1)
    batched = decode(pair, requests, temperature=temperature, batch_size=8)
    assert few_part(list(alone.values()), [batched[key] for key in alone])


def law_of_two_tokens(prompt_ids: tuple[int, ...], temperature: float) -> np.ndarray:
    """Probability (V, V) of each two-token continuation, from the library's own logits; unlikely first tokens are 0."""
    model = AutoModelForCausalLM.from_pretrained(hub.resolve(catalogue.load("tiny")), dtype=torch.float32)
    with torch.inference_mode():
        first_V = torch.softmax(model(torch.tensor([prompt_ids])).logits[0, -1].double() / temperature, -1)
        likely = [int(token) for token in (first_V > 1e-3).nonzero()]
        rows = torch.tensor([[*prompt_ids, token] for token in likely])
        second_FV = torch.softmax(model(rows).logits[:, -1].double() / temperature, -1)
    law = np.zeros((len(first_V), len(first_V)))
    law[likely] = first_V[likely, None].numpy() * second_FV.numpy()
    return law


@pytest.mark.heavy
def test_two_sampled_tokens_have_the_law_of_the_librarys_logits(pair: Pair) -> None:
    """A chi-square test with a fixed seed.

    Chance of a false alarm, for another seed: 1e-4. A law that is off by a total variation of 0.15 is missed with a
    chance below 1e-3 (1500 draws over some thirty cells; simulated for a flatter law, for too few of the likeliest
    text, and for a shift of every cell). The laws of rules are enumerated, this is for what feeds them.
    """
    num_samples, temperature = 1500, 0.8
    ids = encode("import", pair.models.tokenizer)
    requests = [Request(index=0, sample=sample, prompt_ids=ids, max_new_tokens=2) for sample in range(num_samples)]
    drawn = Counter(tuple(text) for text in decode(pair, requests, temperature=temperature, batch_size=250).values())
    expected = law_of_two_tokens(ids, temperature) * num_samples
    cells = [tuple(int(token) for token in cell) for cell in np.argwhere(expected >= 5)]
    counts = [drawn[cell] for cell in cells]
    means = [float(expected[cell]) for cell in cells]
    counts.append(num_samples - sum(counts))
    means.append(num_samples - sum(means))
    assert len(cells) > 20
    assert stats.chisquare(counts, means).pvalue > 1e-4

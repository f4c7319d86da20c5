"""The dial of synthetic weights, measured by the engine: how many drafted tokens are accepted."""

from collections import Counter
from itertools import product

import pytest
import torch

from llama_ssp.ranks.world import start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.jobs import encode
from llama_ssp.settings import catalogue
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DeviceKind,
    DrafterConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SyntheticConfig,
    VerificationConfig,
    WeightsKind,
)
from llama_ssp.settings.tasks import GenerateConfig
from llama_ssp.speculate.engine.state import Request
from tests.helpers.lanes import slow
from training.agreement import TASKS, prompts_of

pytestmark = pytest.mark.seconds

NUM_TEXTS, NUM_TOKENS = 60, 64


@torch.inference_mode()
def acceptance(model: str, agreement: float) -> float:
    """Accepted over examined drafted tokens after the default prompts of compare and latency, on average over both."""
    entry = catalogue.load(model)
    config = RunConfig(
        task=GenerateConfig(),
        model=entry,
        draft=DrafterConfig(kind=MODEL_DRAFT, model=entry),
        placement=PlacementConfig(),
        sampling=SamplingConfig(),
        verification=VerificationConfig(),
        weights=WeightsKind.synthetic,
        synthetic=SyntheticConfig(agreement=agreement),
        batch_size=NUM_TEXTS,
    )
    with start(device=DeviceKind.cpu, timeout_s=60) as world:
        models = load_models(config, world, find_sources(config, world))
    decoder = build_decoder(models, config, speculative=True)
    rates = []
    for task in TASKS:
        prompts, counts = prompts_of(task), Counter[str]()
        requests = [
            Request(
                index=index,
                sample=sample,
                prompt_ids=encode(prompt, models.tokenizer, chat=False),
                max_new_tokens=NUM_TOKENS,
            )
            for sample, (index, prompt) in product(range(NUM_TEXTS // len(prompts)), enumerate(prompts))
        ]
        for updates in decoder.run(requests):
            for done in (update.completion for update in updates if update.completion.finish_reason):
                for accepted, examined in zip(done.accepted_lengths, done.examined_lengths, strict=True):
                    counts["accepted"] += accepted if examined else 0
                    counts["examined"] += examined
        rates.append(counts["accepted"] / counts["examined"])
    return sum(rates) / len(rates)


@pytest.mark.parametrize(
    ("model", "agreement"),
    [
        ("tiny-draft", 0.8),
        *(slow("tiny-draft", level) for level in (0.6, 0.7, 0.9)),
        *(slow("tiny", level) for level in (0.6, 0.7, 0.8, 0.9)),
    ],
)
def test_the_acceptance_is_what_the_dial_says(model: str, agreement: float) -> None:
    """Within 0.03; some 5000 examined tokens, so that chance alone moves the mean by 0.007 (one sigma).

    A draft without noise, or with another agreement's, is off by 0.1 at least. The texts are those that the dial was
    made for: on the prompts of one task alone an agreement of 0.6 comes out as 0.53 or 0.64.
    """
    assert acceptance(model, agreement) == pytest.approx(agreement, abs=0.03)

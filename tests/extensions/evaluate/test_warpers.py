"""Processors are held against transformers' warpers, and a verdict names what samples cannot show."""

from dataclasses import replace
from random import Random

import pytest
import torch

from llama_ssp.extensions.evaluate.suites import distribution
from llama_ssp.extensions.evaluate.warpers import variation_from_warpers
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling import processors
from tests.extensions.evaluate.test_suites import LAW, samples

CPU = torch.device("cpu")
SAMPLINGS = [
    SamplingConfig(temperature=0.8),
    SamplingConfig(temperature=1.3, top_k=40),
    SamplingConfig(temperature=0.7, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_wrong_processor_is_found(sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws at a temperature that is wrong by a hundredth, in both modes and in scoring."""
    assert variation_from_warpers(sampling, CPU) < distribution.MOST_APART
    right = processors.processor
    wrong = lambda given: right(replace(given, temperature=1.01 * given.temperature))  # noqa: E731
    monkeypatch.setattr(processors, "processor", wrong)
    apart = variation_from_warpers(sampling, CPU)
    found = distribution.judge(replace(samples(Random(1), (LAW, LAW)), apart=apart))
    assert not found.passed
    assert found.reason.startswith(f"processors and transformers' warpers are {apart:.2g} apart")


def test_a_verdict_names_what_no_sample_shows() -> None:
    known = replace(samples(Random(1), (LAW, LAW)), out_of_reach=["wrong draws over shards"])
    assert "but could not have found wrong draws over shards" in distribution.judge(known).outcome

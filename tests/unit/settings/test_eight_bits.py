"""The names of 65B and others in 8 bits run where only the documented installation was made."""

import sys
from dataclasses import replace

import pytest
import torch

from llama_ssp import catalogue
from llama_ssp.models.loading import check_model
from llama_ssp.ranks.world import start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.tasks.records import GenerateConfig
from llama_ssp.settings.schema import (
    NO_DRAFT,
    DeviceKind,
    DrafterConfig,
    RunConfig,
    SamplingConfig,
    WeightsKind,
)
from llama_ssp.speculate.engine.state import Request

pytestmark = pytest.mark.seconds


@pytest.mark.parametrize("name", ["7B_8bit", "65B_8bit"])
def test_a_model_in_8_bits_runs_without_bitsandbytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller shape of it, whose weights are synthetic."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it fails, and finding it finds nothing
    entry = catalogue.load(name)
    assert entry.shape
    tiny = catalogue.load("tiny").shape
    assert tiny
    entry = replace(entry, shape=replace(tiny, num_hidden_layers=tiny.num_hidden_layers + 1))
    config = RunConfig(
        task=GenerateConfig(), model=entry, draft=DrafterConfig(kind=NO_DRAFT), weights=WeightsKind.synthetic,
        sampling=SamplingConfig(temperature=0.0), device=DeviceKind.cpu,
    )  # fmt: skip
    with start(device=DeviceKind.cpu, timeout_s=60) as world, torch.inference_mode():
        sources = find_sources(config, world)
        check_model(sources[0].origin, num_ranks=2, quantization=entry.quantization)  # as on GPUs
        models = load_models(config, world, sources)
        decoder = build_decoder(models, config, speculative=False)
        request = Request(index=0, prompt_ids=(5, 6, 7), max_new_tokens=4)
        [done] = [u.completion for updates in decoder.run([request]) for u in updates if u.completion.finish_reason]
    assert len(done.token_ids) == 4

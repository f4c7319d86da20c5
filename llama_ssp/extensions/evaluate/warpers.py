"""Compares a run's processors with transformers' warpers, since scoring uses the same processors as decoding."""

from typing import cast

import torch
import transformers
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from llama_ssp.settings.fields import with_value
from llama_ssp.settings.processors import filters, numbers_of
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling import processors

_SIZE, _SPREAD, _SEED = (64, 4096), 3.0, 0


def variation_from_warpers(sampling: SamplingConfig, device: torch.device) -> float:
    """Return the largest total variation between a run's probabilities and transformers', over some random logits.

    Penalties, biases, bans and filters that transformers lacks are left out. Filters are compared in fp64, where no
    token is near a border by rounding.
    """
    dtype = torch.float64 if sampling.truncates else torch.float32
    logits_BV = _SPREAD * torch.randn(_SIZE, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    logits_BV = logits_BV.to(device, dtype)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    for one, number in numbers_of(sampling, filters()):
        if one.in_transformers:
            warpers.append(getattr(transformers, one.in_transformers.warper)(number))
        else:
            sampling = with_value(sampling, one.name, None)
    no_ids = cast("torch.LongTensor", torch.zeros(1, 1, dtype=torch.long, device=device))
    wanted_BV = warpers(no_ids, cast("torch.FloatTensor", logits_BV.clone())).softmax(-1)
    found_BV = processors.processor(sampling)(logits_BV)
    return float((found_BV - wanted_BV).abs().sum(-1).max() / 2)

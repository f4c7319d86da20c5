"""Holds the processors of a run against the warpers of transformers: scoring uses the same processors as decoding."""

from typing import Any, cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling import processors

_SIZE, _SPREAD, _SEED = (64, 4096), 3.0, 0


def variation_from_warpers(sampling: SamplingConfig, device: torch.device) -> float:
    """The largest total variation between a run's probabilities and transformers', of some random logits.

    Penalties, biases and bans are left out. Filters are compared in fp64, where no token is near a border by rounding.
    """
    dtype = torch.float64 if sampling.truncates else torch.float32
    logits_BV = _SPREAD * torch.randn(_SIZE, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    logits_BV = logits_BV.to(device, dtype)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    filters: list[tuple[type[Any], float | None]] = [
        (TopKLogitsWarper, sampling.top_k),
        (TopPLogitsWarper, sampling.top_p),
        (MinPLogitsWarper, sampling.min_p),
    ]
    warpers.extend(warper(value) for warper, value in filters if value is not None)
    no_ids = cast("torch.LongTensor", torch.zeros(1, 1, dtype=torch.long, device=device))
    wanted_BV = warpers(no_ids, cast("torch.FloatTensor", logits_BV.clone())).softmax(-1)
    found_BV = processors.processor(sampling)(logits_BV)
    return float((found_BV - wanted_BV).abs().sum(-1).max() / 2)

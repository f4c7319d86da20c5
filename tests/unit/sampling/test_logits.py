"""The processors keep what transformers' warpers keep, and a draw inverts the cumulative distribution exactly."""

from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llama_ssp.config.schema import SamplingConfig
from llama_ssp.sampling.logits import draw, processor
from tests.helpers.exact_law import LARGEST_UNIFORM


def warped(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """What transformers samples from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    no_ids = cast("torch.LongTensor", torch.zeros(1, 1, dtype=torch.long))
    scores = cast("torch.FloatTensor", logits.clone())
    return warpers(no_ids, scores).softmax(-1)


@pytest.mark.parametrize("top_p", [None, 0.05, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 7, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_processors_agree_with_transformers(
    temperature: float, top_k: int | None, top_p: float | None, dtype: torch.dtype
) -> None:
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    logits_BV = 3 * torch.randn(40, 200, generator=torch.Generator().manual_seed(3), dtype=dtype)
    logits_BV[:, ::9] = float("-inf")
    probs_BV = processor(sampling)(logits_BV)
    expected_BV = warped(logits_BV, sampling)
    assert torch.equal(probs_BV > 0, expected_BV > 0)
    torch.testing.assert_close(probs_BV, expected_BV, rtol=3e-5 if dtype is torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("top_p", [None, 0.55])
def test_top_k_keeps_every_token_that_ties_with_the_last_kept_one_as_transformers_does(top_p: float | None) -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=2, top_p=top_p)
    logits_BV = torch.tensor([[0.0, 1.0, 1.0, 2.0, 1.0, -1.0]])
    probs_BV = processor(sampling)(logits_BV)
    assert (probs_BV[0] > 0).tolist() == [False, True, True, True, True, False]
    if top_p is None:
        torch.testing.assert_close(probs_BV, warped(logits_BV, sampling))


def test_top_p_keeps_tokens_that_tie_together() -> None:
    probs_BV = processor(SamplingConfig(temperature=1.0, top_p=0.5))(torch.zeros(1, 4))
    torch.testing.assert_close(probs_BV, torch.full((1, 4), 0.25))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=5, top_p=0.9), SamplingConfig(top_p=0.9)])
def test_leading_dimensions_and_the_callers_logits_do_not_matter(sampling: SamplingConfig) -> None:
    logits_BTV = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(4))
    before_BTV = logits_BTV.clone()
    probs_BTV = processor(sampling)(logits_BTV)
    assert torch.equal(logits_BTV, before_BTV)
    assert torch.equal(probs_BTV[1, 2], processor(sampling)(logits_BTV[1, 2]))


def test_half_precision_logits_become_fp32_and_fp64_is_kept() -> None:
    process = processor(SamplingConfig())
    dtypes = [process(torch.zeros(1, 4, dtype=d)).dtype for d in (torch.bfloat16, torch.float16, torch.float64)]
    assert dtypes == [torch.float32, torch.float32, torch.float64]


def test_the_token_changes_just_at_the_cumulative_probabilities() -> None:
    probs_V = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.6, 0.3, 0.0], dtype=torch.float64)
    uniforms_B = torch.tensor([0.1 - 1e-12, 0.1 + 1e-12, 0.7 - 1e-12, 0.7 + 1e-12], dtype=torch.float64)
    assert draw(probs_V.expand(4, 7), uniforms_B[:, None])[:, 0].tolist() == [1, 4, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_probability_0_is_never_drawn(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    logits_BV = 8 * torch.randn(2000, 64, generator=generator, dtype=dtype)
    logits_BV[torch.rand(2000, 64, generator=generator) < 0.5] = float("-inf")
    logits_BV[:, 32] = 0.0
    probs_BV = logits_BV.softmax(-1)
    cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    borders = [cumulative_BV[:, column].clamp_max(LARGEST_UNIFORM) for column in range(64)]
    ends = [torch.full((2000,), end, dtype=torch.float64) for end in (0.0, LARGEST_UNIFORM)]
    for uniforms_B in (*ends, *borders):
        ids_B = draw(probs_BV, uniforms_B[:, None])[:, 0]
        assert bool((probs_BV.gather(1, ids_B[:, None]) > 0).all())


def test_nan_gives_an_id_inside_the_vocabulary() -> None:
    ids_B = draw(torch.full((2, 5), float("nan")), torch.tensor([[0.0], [0.9]], dtype=torch.float64))
    assert bool(((ids_B >= 0) & (ids_B < 5)).all())

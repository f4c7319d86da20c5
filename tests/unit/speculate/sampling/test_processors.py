"""The processors keep what transformers' warpers keep, and a draw has exactly the law of its weights."""

import math
from dataclasses import fields
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.settings.processors import PROCESSORS
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.processors import draw, processor
from tests.helpers.exact_law import LARGEST_UNIFORM
from tests.helpers.lanes import grid


def warped(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """What transformers samples from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    no_ids = cast("torch.LongTensor", torch.zeros(1, 1, dtype=torch.long))
    scores = cast("torch.FloatTensor", logits.clone())
    return warpers(no_ids, scores).softmax(-1)


@grid(
    dtype=[torch.float32, torch.float64],
    temperature=[0.5, 1.7],
    top_k=[None, 1, 7, 1000],
    top_p=[None, 0.05, 0.6, 0.95, 1.0],
    min_p=[None, 0.02, 0.5, 1.0],
)
def test_processors_agree_with_transformers(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, dtype: torch.dtype
) -> None:
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits_BV = 3 * torch.randn(40, 200, generator=torch.Generator().manual_seed(3), dtype=dtype)
    logits_BV[:, ::9] = float("-inf")
    probs_BV = processor(sampling)(logits_BV)
    expected_BV = warped(logits_BV, sampling)
    assert torch.equal(probs_BV > 0, expected_BV > 0)
    torch.testing.assert_close(probs_BV, expected_BV, rtol=3e-5 if dtype is torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize(
    ("sampling", "logits", "kept", "as_library"),
    [
        ({"top_k": 2}, [0.0, 1.0, 1.0, 2.0, 1.0, -1.0], [1, 2, 3, 4], True),
        ({"top_k": 2, "top_p": 0.55}, [0.0, 1.0, 1.0, 2.0, 1.0, -1.0], [1, 2, 3, 4], False),
        ({"top_p": 0.5}, [0.0, math.log(2), float("-inf"), 0.0], [1], True),  # it is reached exactly
        ({"top_p": 0.5}, [0.0] * 4, [0, 1, 2, 3], False),
    ],
)
def test_every_token_that_ties_with_the_last_kept_one_is_kept(
    sampling: dict[str, Any], logits: list[float], kept: list[int], as_library: bool
) -> None:
    """Transformers does so for top-k."""
    config, logits_BV = SamplingConfig(temperature=1.0, **sampling), torch.tensor([logits], dtype=torch.float64)
    probs_BV = processor(config)(logits_BV)
    assert (probs_BV[0] > 0).nonzero()[:, 0].tolist() == kept
    if as_library:
        torch.testing.assert_close(probs_BV, warped(logits_BV, config))


CHANGED: dict[str, Any] = {
    "temperature": 0.5,
    **{name: 2 if one.allows(2) else 0.5 for name, one in PROCESSORS.all().items()},
    "top_nsigma": 0.5,
    "logit_bias": {3: 1.0},
    "bad_words": ["x"],
    "min_new_tokens": 3,
    "bad_ids": ((3,),),
    "eos_ids": (3,),
    "by_row": True,
    "from_model": ["top_k"],
}
"""Every setting, changed."""


@pytest.mark.parametrize("name", [one.name for one in fields(SamplingConfig)])
def test_a_setting_that_leaves_out_tokens_is_said_to(name: str) -> None:
    """Else draws over shards, whose law is a softmax, would take no note of it."""
    sampling = SamplingConfig(**{"temperature": 1.0, name: CHANGED[name]})
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    softmax = (logits / sampling.temperature).softmax(-1)
    assert sampling.truncates != torch.allclose(processor(sampling)(logits), softmax)


@pytest.mark.parametrize("top_p", [None, 0.8])
def test_a_draft_that_breaks_ties_keeps_just_so_many_of_them(top_p: float | None) -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=3, top_p=top_p)
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 2.0, -1.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    probs, whole = (processor(sampling, breaks_ties=each)(logits) for each in (True, False))
    assert (probs > 0).sum(-1).tolist() == [3, (whole[1] > 0).sum()]
    assert probs.sum(-1).tolist() == pytest.approx([1, 1])
    assert torch.equal(probs[1], whole[1])
    assert (whole[0] > 0).sum() == 4


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=5, top_p=0.9), SamplingConfig(min_p=0.1)])
def test_leading_dimensions_and_the_callers_logits_do_not_matter(sampling: SamplingConfig) -> None:
    logits_BTV = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(4))
    before_BTV = logits_BTV.clone()
    probs_BTV = processor(sampling)(logits_BTV)
    assert torch.equal(logits_BTV, before_BTV)
    assert torch.equal(probs_BTV[1, 2], processor(sampling)(logits_BTV[1, 2]))


def test_blocks_then_tokens_change_just_at_their_cumulative_shares() -> None:
    assert tokens_of_a_block(7) == 2
    probs_V = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.6, 0.3, 0.0], dtype=torch.float64)
    below, above = 0.1 - 1e-12, 0.1 + 1e-12
    first_B = [0, below, below, above, above, LARGEST_UNIFORM]
    second_B = [LARGEST_UNIFORM, 0, LARGEST_UNIFORM, 2 / 3 - 1e-12, 2 / 3 + 1e-12, LARGEST_UNIFORM]
    uniforms_BP = torch.tensor([first_B, second_B], dtype=torch.float64).T
    assert draw(probs_V.expand(6, 7), uniforms_BP)[:, 0].tolist() == [1, 1, 1, 4, 5, 5]


@pytest.mark.parametrize("vocab_size", [1, 2, 4, 11, 50, 64, 300])
def test_the_law_of_a_draw_is_that_of_its_weights(vocab_size: int) -> None:
    """Measured at the borders of its answers: those of the block, then those of the token within each block."""
    weights_V = torch.rand(vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64).pow_(6)
    weights_V /= weights_V.sum()
    block_size = tokens_of_a_block(vocab_size)

    def border(of: Tensor, *, first: Tensor | None) -> Tensor:
        """The least number with which an id of at least `of` is drawn: the first one, or the second in its block."""
        low, high = torch.zeros(len(of), dtype=torch.float64), torch.ones(len(of), dtype=torch.float64)
        for _ in range(60):
            middle = ((low + high) / 2).clamp_max_(LARGEST_UNIFORM)
            numbers = (middle, torch.full_like(middle, LARGEST_UNIFORM)) if first is None else (first, middle)
            ids = draw(weights_V.expand(len(of), -1), torch.stack(numbers, 1))[:, 0]
            low, high = torch.where(ids < of, middle, low), torch.where(ids < of, high, middle)
        return high

    ids_V = torch.arange(vocab_size)
    blocks = torch.arange(0, vocab_size, block_size)
    edges = torch.cat([border(blocks, first=None), torch.ones(1, dtype=torch.float64)])
    middles, widths = (edges[1:] + edges[:-1]) / 2, edges.diff()
    first_V = middles[ids_V // block_size]
    ends = (ids_V + 1) % block_size == 0
    above = torch.where(ends, torch.ones_like(first_V), border(ids_V + 1, first=first_V))
    below = torch.where(ids_V % block_size == 0, torch.zeros_like(first_V), border(ids_V, first=first_V))
    law_V = widths[ids_V // block_size] * (above - below)
    torch.testing.assert_close(law_V, weights_V, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_probability_0_is_never_drawn(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    logits_BV = 8 * torch.randn(2000, 64, generator=generator, dtype=dtype)
    logits_BV[torch.rand(2000, 64, generator=generator) < 0.7] = float("-inf")
    logits_BV[:, 32] = 0.0
    probs_BV = logits_BV.softmax(-1)
    blocks_BCM = probs_BV.double().unflatten(1, (-1, tokens_of_a_block(64)))
    ends = [torch.full((2000,), end, dtype=torch.float64) for end in (0.0, LARGEST_UNIFORM)]
    for first_B in (*ends, *blocks_BCM.sum(-1).cumsum(-1).clamp_max_(LARGEST_UNIFORM).unbind(1)):
        drawn_B = draw(probs_BV, torch.stack([first_B, ends[0]], 1))[:, 0]
        tokens_BM = blocks_BCM[torch.arange(2000), drawn_B // tokens_of_a_block(64)]
        shares_BM = tokens_BM.cumsum(-1) / tokens_BM.sum(-1, keepdim=True)
        for second_B in (*ends, *shares_BM.clamp_max_(LARGEST_UNIFORM).unbind(1)):
            ids_B1 = draw(probs_BV, torch.stack([first_B, second_B], 1))
            assert bool((probs_BV.gather(1, ids_B1) > 0).all())


def test_fewer_draws_change_where_weights_round_differently_than_by_one_cumulative_sum() -> None:
    generator = torch.Generator().manual_seed(9)
    weights_V = (3 * torch.randn(4096, generator=generator, dtype=torch.float64)).softmax(-1)
    rounded_V = weights_V * (1 + 1e-3 * torch.randn(4096, generator=generator, dtype=torch.float64))
    uniforms_BP = torch.rand(2000, 2, generator=generator, dtype=torch.float64)

    def by_one_sum(weights_V: Tensor) -> Tensor:
        return torch.searchsorted(weights_V.cumsum(0) / weights_V.sum(), uniforms_BP[:, 0].contiguous())

    changed = draw(weights_V.expand(2000, -1), uniforms_BP) != draw(rounded_V.expand(2000, -1), uniforms_BP)
    assert 0 < 3 * changed.sum() < (by_one_sum(weights_V) != by_one_sum(rounded_V)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_gives_an_id_inside_the_vocabulary(dtype: torch.dtype) -> None:
    uniforms_BP = torch.tensor([[0.0, 0.9], [0.9, 0.0]], dtype=torch.float64)
    ids_B = draw(torch.full((2, 5), float("nan"), dtype=dtype), uniforms_BP)
    assert bool(((ids_B >= 0) & (ids_B < 5)).all())

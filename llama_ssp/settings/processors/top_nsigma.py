"""Top-n sigma: only tokens whose logits are within n standard deviations of the largest one.

The temperature scales logits and deviation alike, so the tokens are the same before and after it. Logits of minus
infinity do not count. Source: Tang et al. 2024, arXiv:2411.07641.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_ssp.settings.processors import Candidates, Filter, in_dtype

if TYPE_CHECKING:
    from torch import Tensor


def _keep(found: Candidates, number: float | Tensor) -> Tensor:
    below = found.logits.amax(-1, keepdim=True) - found.logits
    is_out = below == float("inf")
    num_in = (~is_out).sum(-1, keepdim=True).double()
    # As shares of the range, since squares of logits at any temperature may be too small; 0 where all are equal.
    shares = below.masked_fill_(is_out, 0.0).div_(below.amax(-1, keepdim=True)).nan_to_num_(0.0)
    mean = shares.sum(-1, keepdim=True, dtype=num_in.dtype) / num_in
    squares = shares.norm(dim=-1, keepdim=True, dtype=num_in.dtype).square()
    deviation = in_dtype((squares / num_in - mean.square()).clamp_min(0.0).sqrt(), shares)
    return (shares <= in_dtype(number, shares) * deviation) & ~is_out


TOP_NSIGMA = Filter(
    name="top_nsigma",
    order=10,
    off=0.0,
    also_off=(-1,),
    allows=lambda n: 0 < n < float("inf"),
    required="above 0, for example 1.0, or {null} to switch it off",
    keep=_keep,
)

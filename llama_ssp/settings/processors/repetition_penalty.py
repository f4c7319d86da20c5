"""Repetition penalty: divides the logits of tokens of prompt and text. Source: Keskar et al. 2019, arXiv:1909.05858."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_ssp.settings.processors import Counts, InTransformers, Penalty

if TYPE_CHECKING:
    from torch import Tensor


def _change(logits_BTV: Tensor, counts: Counts, penalty: float | Tensor) -> Tensor:
    """Negative logits are multiplied, as in transformers."""
    is_known_BTV = counts.of_all() > 0  # first, since counting takes the most memory
    scaled_BTV = (logits_BTV * penalty).where(logits_BTV < 0, logits_BTV / penalty)
    return scaled_BTV.where(is_known_BTV, logits_BTV)


REPETITION = Penalty(
    name="repetition_penalty",
    order=1,
    off=1.0,
    allows=lambda p: 1 <= p * 100 <= 100**2,  # logits stay finite
    required="from 1/100 to 100, for example 1.1; 1 switches it off",
    in_transformers=InTransformers("RepetitionPenaltyLogitsProcessor", default=1.0, off=1.0),
    audited=2.0,
    change=_change,
)

"""Min-p: only tokens with at least this share of the highest probability.

Source: Minh et al. 2024, arXiv:2407.01082.
"""

from llama_ssp.settings.processors import Filter, InTransformers, in_dtype

MIN_P = Filter(
    name="min_p",
    order=13,
    off=0.0,
    allows=lambda p: 0 < p <= 1,
    required="above 0 and at most 1, or {null} to switch it off",
    in_transformers=InTransformers("MinPLogitsWarper", default=None, off=None),
    audited=0.2,
    keep=lambda found, p: found.probs >= in_dtype(p, found.probs) * found.probs.amax(-1, keepdim=True),
    reads_logits=False,
)

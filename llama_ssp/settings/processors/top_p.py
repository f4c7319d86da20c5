"""Top-p: only the most probable tokens that hold this much probability. Source: Holtzman et al. 2020, arXiv:1904.09751.

Tokens with the logit of the last one are left too; transformers leaves those that its sort puts first.
"""

from llama_ssp.settings.processors import Filter, InTransformers

TOP_P = Filter(
    name="top_p",
    order=12,
    off=1.0,
    allows=lambda p: 0 < p <= 1,
    required="above 0 and at most 1, or {null} to switch it off",
    in_transformers=InTransformers("TopPLogitsWarper", default=None, off=1.0),
    audited=0.5,
    keep=lambda found, share: found.first((found.mass_before() < share).sum(-1, keepdim=True)),
)

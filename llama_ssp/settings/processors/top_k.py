"""Top-k: only the k most probable tokens. Source: Fan et al. 2018, arXiv:1805.04833."""

from llama_ssp.settings.processors import Filter, InTransformers

TOP_K = Filter(
    name="top_k",
    order=11,
    off=0,
    also_off=(-1,),
    allows=lambda k: k >= 1,
    required="at least 1, or {null} for the whole vocabulary",
    in_transformers=InTransformers("TopKLogitsWarper", default=50, off=0),
    audited=3,
    keep=lambda found, k: found.first(k),
)

"""Qwen 3: Llama with norms of queries and keys."""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.gated import gated
from llama_ssp.architectures.qwen2 import FAMILY as QWEN2

FAMILY = replace(QWEN2, model_type="qwen3", parameters=partial(gated, has_head_norms=True))

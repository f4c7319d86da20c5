"""Mistral: Llama with an optional sliding window in all layers."""

from typing import Any

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.gated import gated


def _windows(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
    return (config.sliding_window,) * int(config.num_hidden_layers)


FAMILY = Family(model_type="mistral", parameters=gated, is_llama_kind=True, cuts_vocabulary=True, windows=_windows)

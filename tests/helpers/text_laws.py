"""Counts sampled texts for a test against the law that their model's definition gives."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.processors import processor

_FEWEST = 8
"""Expected texts of a cell, at least."""


class HasLogits(Protocol):
    """A model that a law is read from."""

    def logits(self, ids: list[int]) -> Tensor:
        """The logits (V,) after a text."""


class LibraryLogits:
    """A model of the library as `counted` reads it."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def logits(self, ids: list[int]) -> Tensor:
        """The logits (V,) after a text."""
        with torch.inference_mode():
            return self._library(torch.tensor([ids])).logits[0, -1]  # type: ignore[no-any-return]


def counted(
    target: HasLogits, prompt: tuple[int, ...], texts: Sequence[tuple[int, ...]], *, sampling: SamplingConfig
) -> tuple[list[float], list[float]]:
    """How often each text occurs, and is expected to; rare texts are counted together."""
    process = processor(sampling)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in texts[0]:
        law = {
            (*text, token): prob * float(share)
            for text, prob in law.items()
            for token, share in enumerate(process(target.logits([*prompt, *text]).double()))
            if share > 0
        }
    common = [text for text, prob in law.items() if prob * len(texts) > _FEWEST]
    counts = [float(texts.count(text)) for text in common]
    expected = [law[text] * len(texts) for text in common]
    rest = len(texts) - sum(expected)
    if rest > _FEWEST:
        return [*counts, len(texts) - sum(counts)], [*expected, rest]
    scale = sum(counts) / sum(expected)
    return counts, [each * scale for each in expected]

"""The keys of rows, and the numbers of one round for given keys and starts, as a batch looks them up."""

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor

from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable, row_key


def keys_of(prompts: Sequence[int], samples: Iterable[int] = repeat(0), *, seed: int) -> Tensor:
    """The keys (B,) of some prompts' samples."""
    pairs = zip(prompts, samples, strict=False)
    return torch.tensor([row_key(seed=seed, prompt=prompt, sample_index=sample) for prompt, sample in pairs])


def draws_of(table: UniformTable, keys_B: Tensor, starts_B: Tensor) -> Draws:
    """Make and name the numbers of the rounds that begin at `starts_B`."""
    return table.split(table.uniforms(keys_B, starts_B))

"""Where the numbers of a model come from, as far as building and loading it need to know.

Two stand behind it: a folder of files (`checkpoint.Checkpoint`), and a recipe (`synthetic.Synthetic`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llama_ssp.config.schema import ModelShape


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """What is known of a tensor before it is read.

    Attributes:
        dtype: its number format; None for one that no weight of a model can have.
        shape: its whole shape.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """A model that can be read tensor by tensor, and slice by slice."""

    @property
    def folder(self) -> Path:
        """Where its tokenizer and its generation config are; messages name it."""
        ...

    @property
    def config(self) -> PretrainedConfig:
        """The library's own configuration of the model."""
        ...

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        ...

    @property
    def context(self) -> int:
        """The most tokens that a sequence may have."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The number format that it has by itself."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """Every tensor, by the name that `read` knows."""
        ...

    def read(
        self,
        name: str,
        *,
        dim: int | None = None,
        parts: Sequence[range] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Make a tensor, or a slice of it.

        Args:
            name: one of `tensors`.
            dim: the dimension that is cut; None makes the whole tensor.
            parts: what to keep of that dimension, in this order.
            dtype: number format; None keeps the tensor's own.
            device: where it goes; None is the CPU.

        Returns:
            A contiguous tensor of its own.
        """
        ...

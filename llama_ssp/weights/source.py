"""The interface of a weight source: files (`checkpoint.Checkpoint`) or a recipe (`synthetic.Synthetic`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llama_ssp.config.schema import ModelShape


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """What is known of a tensor before it is read.

    Attributes:
        dtype: None if weights cannot have it; of a packed tensor, that of its scales.
        shape: of the whole tensor, unpacked.
        is_packed: it is read as rows of bytes; see `int4_rows`.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    is_packed: bool = False


class Wanted(TypedDict, total=False):
    """What to read of a tensor.

    Attributes:
        dim: the dimension that is cut; None for the whole tensor.
        parts: what to keep of that dimension, in this order.
        dtype: None for that of the tensor; has no effect on packed ones.
        device: None for the CPU.
    """

    dim: int | None
    parts: Sequence[range]
    dtype: torch.dtype | None
    device: torch.device | None


class WeightSource(Protocol):
    """A model whose tensors can be read one by one, whole or in slices."""

    @property
    def folder(self) -> Path:
        """The folder of its tokenizer and generation config, for messages too."""

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of transformers."""

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""

    @property
    def context(self) -> int:
        """The maximum sequence length."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""

    @property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """All tensors by name."""

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """Return one of `tensors` or a slice of it, contiguous and not shared."""

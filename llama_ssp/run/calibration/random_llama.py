"""Llamas with random weights in the lean decoder, for the whole forwards that `task=calibrate` times."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ssp.architectures.family import inventory
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.planning.memory import model_bytes
from llama_ssp.planning.spec import PlannedModel
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.formats import NO_QUANTIZATION
from llama_ssp.settings.schema import Dtype, ModelShape
from llama_ssp.weights.source import TensorFacts, Wanted
from llama_ssp.weights.synthetic import llama_config

MLP_SHARE, HEAD_DIM = 4, 32
_CONTEXT = 1024
_LARGEST = 0.05


@dataclass(frozen=True)
class RandomLlama:
    """A Llama with random weights and half as many key-value heads as query heads; an `origin.WeightSource`.

    `width` is a multiple of twice `HEAD_DIM`. With `from_16_bits` a CPU stores the weights in 16 bits.
    """

    width: int
    num_layers: int
    vocab_size: int
    from_16_bits: bool = False
    context: ClassVar[int] = _CONTEXT

    @property
    def folder(self) -> Path:
        """A name for messages; no such folder exists."""
        return Path(f"random-{self.width}x{self.num_layers}")

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        num_heads = self.width // HEAD_DIM
        return ModelShape(
            model_type="llama", num_hidden_layers=self.num_layers, hidden_size=self.width,
            num_attention_heads=num_heads, num_key_value_heads=num_heads // 2, head_dim=HEAD_DIM,
            intermediate_size=MLP_SHARE * self.width, vocab_size=self.vocab_size, max_position_embeddings=_CONTEXT,
        )  # fmt: skip

    @cached_property
    def config(self) -> LlamaConfig:
        """The transformers configuration."""
        return llama_config(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return torch.bfloat16 if self.from_16_bits else torch.float32

    @cached_property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """Every tensor, by its name in transformers."""
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        return {name: TensorFacts(dtype=self.dtype, shape=tuple(p.shape)) for name, p in model.named_parameters()}

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """Make a tensor, or a slice of it (see `WeightSource.read`): uniform numbers, the ones of a norm."""
        sizes = list(self.tensors[name].shape)
        if (dim := wanted.get("dim")) is not None:
            sizes[dim] = sum(len(part) for part in wanted["parts"])
        values = torch.ones(sizes) if len(sizes) == 1 else torch.empty(sizes).uniform_(-_LARGEST, _LARGEST)
        return values.to(self.dtype).to(device=wanted.get("device"), dtype=wanted.get("dtype") or self.dtype)

    @property
    def planned(self) -> PlannedModel:
        """The planner's description of it in fp32."""
        name, stored = self.folder.name, Dtype.bf16 if self.from_16_bits else Dtype.fp32
        return PlannedModel(name=name, shape=self.shape, dtype=Dtype.fp32, quantization=NO_QUANTIZATION, stored=stored)

    @property
    def num_bytes(self) -> int:
        """Size of its weights on a CPU, all ranks together."""
        return model_bytes(inventory(self.shape), self.planned, device="cpu").total_bytes

    def load(self, comm: Comm) -> Runner:
        """Load this rank's slice in fp32 on the CPU; all ranks of `comm` must call this together."""
        return load_model(self, dtype=torch.float32, device=torch.device("cpu"), comm=comm)

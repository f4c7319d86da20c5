"""A lean Llama for training on a CPU, with the parameter names of transformers.

What it does: the forward pass of `LlamaForCausalLM` on full rows (no cache), so that a state
dict moves to transformers unchanged.
What it does not do: generate, shard, or load files.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.tokenizer import CONTEXT, VOCABULARY


@dataclass(frozen=True)
class Shape:
    """The sizes of one model.

    Attributes:
        hidden: Width of the residual stream.
        layers: Number of decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        intermediate: Inner width of the feed-forward part.
        tied: Whether the output head is the embedding.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


TARGET = Shape(hidden=256, layers=10, heads=8, kv_heads=4, intermediate=1024, tied=False)
DRAFT = Shape(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=512, tied=True)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return functional.rms_norm(x_BTC, self.weight.shape, self.weight.to(x_BTC.dtype), self.eps)


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Returns the cosine and signed sine tables, each of shape (length, head_dim)."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    sin_TD = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return torch.cat((angles.cos(), angles.cos()), dim=-1), sin_TD


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Applies rotary positions in the half-split layout of transformers."""
    return x_BHTD * cos_TD + x_BHTD.roll(x_BHTD.shape[-1] // 2, dims=-1) * sin_TD


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Attends over each row."""
        batch, length, _ = x_BTC.shape
        split = (batch, length, -1, self.shape.head_dim)
        q_BHTD = rotate(self.q_proj(x_BTC).view(split).transpose(1, 2), cos_TD, sin_TD)
        k_BGTD = rotate(self.k_proj(x_BTC).view(split).transpose(1, 2), cos_TD, sin_TD)
        v_BGTD = self.v_proj(x_BTC).view(split).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        k_BHTD = k_BGTD.repeat_interleave(groups, dim=1)
        v_BHTD = v_BGTD.repeat_interleave(groups, dim=1)
        y_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        y_BTC: Tensor = self.o_proj(y_BHTD.transpose(1, 2).reshape(batch, length, -1))
        return y_BTC


class FeedForward(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps each position on its own."""
        y_BTC: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return y_BTC


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Adds attention and feed-forward to the residual stream."""
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_TD, sin_TD)
        y_BTC: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return y_BTC


class Body(nn.Module):
    """Embedding, layers and final normalisation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)


class Llama(nn.Module):
    """The model: token ids of shape (B, T) to logits of shape (B, T, V)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        cos_TD, sin_TD = rope_tables(shape, CONTEXT)
        self.register_buffer("cos_TD", cos_TD, persistent=False)
        self.register_buffer("sin_TD", sin_TD, persistent=False)
        self._initialise()
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if not name.endswith("norm.weight"):
                std = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * self.shape.layers) ** 0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Returns next-token logits for every position."""
        x_BTC = self.model.embed_tokens(ids_BT)
        if torch.is_autocast_enabled("cpu"):
            x_BTC = x_BTC.to(torch.get_autocast_dtype("cpu"))
        length = ids_BT.shape[1]
        cos_TD = self.get_buffer("cos_TD")[:length].to(x_BTC.dtype)
        sin_TD = self.get_buffer("sin_TD")[:length].to(x_BTC.dtype)
        for layer in self.model.layers:
            x_BTC = layer(x_BTC, cos_TD, sin_TD)
        logits_BTV: Tensor = self.lm_head(self.model.norm(x_BTC))
        return logits_BTV

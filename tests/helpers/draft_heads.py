"""Small draft heads in both public layouts of EAGLE-3, and a reference of what they compute, written from the paper.

Shapes: L pairs of a row, E width, X taps, D drafted tokens, V vocabulary, H heads of D dimensions.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from llama_ssp.weights.checkpoint import Checkpoint, inspect
from tests.helpers import models
from tests.helpers.extensions import of_heads

if TYPE_CHECKING:
    from llama_ssp.extensions.heads.sources import HeadSource

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 320,
}
SMALL_WIDTH = 64
"""Of `save_small_pair`."""


def make_tensors(*, vocab_size: int = 4096, num_drafted: int = 1024, seed: int = 0, **sizes: int) -> dict[str, Tensor]:
    """Random tensors of a head, in the original layout; it drafts every fourth token of the first ones."""
    generator = torch.Generator().manual_seed(seed)
    found = SIZES | sizes
    width, units, dim = found["hidden_size"], found["intermediate_size"], found["head_dim"]
    queries, keys = found["num_attention_heads"] * dim, found["num_key_value_heads"] * dim

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).div_(float(shape[-1]) ** 0.5)

    drafted_D = torch.arange(num_drafted) * (vocab_size // num_drafted)
    return {
        "fc.weight": some(width, 3 * width),
        "midlayer.self_attn.q_proj.weight": some(queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": some(keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": some(keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": some(width, queries),
        "midlayer.mlp.gate_proj.weight": some(units, width),
        "midlayer.mlp.up_proj.weight": some(units, width),
        "midlayer.mlp.down_proj.weight": some(width, units),
        "midlayer.input_layernorm.weight": 1 + some(width),
        "midlayer.hidden_norm.weight": 1 + some(width),
        "midlayer.post_attention_layernorm.weight": 1 + some(width),
        "norm.weight": 1 + some(width),
        "lm_head.weight": 3 * some(num_drafted, width),
        "d2t": drafted_D - torch.arange(num_drafted),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, drafted_D, value=True),
    }


def save_original(folder: Path, tensors: Mapping[str, Tensor], **changed: Any) -> Path:
    config = (
        layer_config(tensors)
        | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": tensors["lm_head.weight"].shape[0]}
        | changed
    )
    return _save(folder, tensors, config)


def save_small_pair(
    folder: Path, family: str = "llama", changed: dict[str, Any] | None = None, of_head: dict[str, Any] | None = None
) -> "tuple[Checkpoint, HeadSource]":
    """Save a target of six layers and a head for it, all of whole blocks; fields of their configs may be changed."""
    of_both = {"hidden_size": SMALL_WIDTH, "head_dim": 16, "vocab_size": 224}
    models.build_checkpoint(folder / "target", family, **of_both | {"num_hidden_layers": 6} | (changed or {}))
    sizes = {**of_both, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    save_original(folder / "head", make_tensors(num_drafted=112, **sizes), **sizes | (of_head or {}))
    return inspect_pair(folder)


def inspect_pair(folder: Path) -> "tuple[Checkpoint, HeadSource]":
    """The target and the head for it in a folder."""
    head, target = inspect(folder / "head"), inspect(folder / "target")
    assert head.head
    return target, of_heads("sources").of_target(head, head.head, target)


def save_speculator(
    folder: Path, tensors: Mapping[str, Tensor], embedding: Tensor | None = None, **changed: Any
) -> Path:
    """Save a head in the format of `speculators`, with its own embedding if that is given."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if embedding is not None:
        renamed["embed_tokens.weight"] = embedding
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "speculators.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_config(tensors),
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
        "norm_before_residual": False,
        "target_hidden_size": None,
    } | changed
    return _save(folder, renamed, config)


def layer_config(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config of the one layer of a head, as a Llama's."""
    return SIZES | {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 2048,
        "vocab_size": len(tensors["t2d"]),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _save(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def turned(x_HLD: Tensor, *, first: int = 0) -> Tensor:
    """Rotary embedding at positions from `first` on, over pairs of dimensions i and i + D / 2."""
    half = x_HLD.shape[-1] // 2
    angles_LP = (first + torch.arange(x_HLD.shape[1]))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    low, high = x_HLD[..., :half], x_HLD[..., half:]
    cos, sin = angles_LP.cos(), angles_LP.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def reference(
    tensors: Mapping[str, Tensor],
    embedded_LE: Tensor,
    taps_LX: Tensor,
    *,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    skipped: range = range(0),
) -> Tensor:
    """Logits (V,) of the head after pairs of these embeddings, of which only the first have taps.

    The last pairs do not see the `skipped` ones.

    Each later pair has the output of the pair before it in place of taps; so all pairs are computed once more for each
    of them.
    """
    found = {name.replace("midlayer.", "layer."): tensor.double() for name, tensor in tensors.items()}
    embedded_LE, hidden_LE = embedded_LE.double(), taps_LX.double() @ found["fc.weight"].T
    while True:
        num_pairs, heads, keys = len(hidden_LE), SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
        normed_LE = norm(hidden_LE, found["layer.hidden_norm.weight"])
        joined = torch.cat([norm(embedded_LE[:num_pairs], found["layer.input_layernorm.weight"]), normed_LE], dim=-1)
        q, k, v = (
            (joined @ found[f"layer.self_attn.{name}_proj.weight"].T).unflatten(1, (number, -1)).transpose(0, 1)
            for name, number in (("q", heads), ("k", keys), ("v", keys))
        )
        k, v = (part.repeat_interleave(heads // keys, 0) for part in (turned(k), v))
        sees_LL = torch.ones(num_pairs, num_pairs, dtype=torch.bool).tril()
        sees_LL[skipped.stop :, skipped.start : skipped.stop] = False
        attended = functional.scaled_dot_product_attention(turned(q), k, v, sees_LL).transpose(0, 1).flatten(1)
        x_LE = (normed_LE if norm_before_residual else hidden_LE) + attended @ found["layer.self_attn.o_proj.weight"].T
        inner = norm(x_LE, found["layer.post_attention_layernorm.weight"])
        gate, up = (inner @ found[f"layer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x_LE += (functional.silu(gate) * up) @ found["layer.mlp.down_proj.weight"].T
        normed_E = norm(x_LE[-1], found["norm.weight"])
        if num_pairs == len(embedded_LE):
            drafted_D = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
            nowhere_V = torch.full((len(tensors["t2d"]),), float("-inf"), dtype=torch.float64)
            return nowhere_V.index_copy_(0, drafted_D, found["lm_head.weight"] @ normed_E)
        hidden_LE = torch.cat([hidden_LE, (normed_E if norm_output else x_LE[-1])[None]])

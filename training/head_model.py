"""An EAGLE-3 draft head for training, with the tensor names of the public checkpoints.

What it does: the one layer that reads three taps of a target and drafts from them, the attention of a
head that drafts from its own states in training, and the saved form.
What it does not do: know about losses, optimisers or sampling.

Shapes: B rows, P pairs, S drafting steps, E width of the target, W drafted vocabulary. Pair i joins the taps of
position i with the embedding of the token at i + 1, has rotary position i, and predicts the token at i + 2.

Source: Li et al. 2025, arXiv:2503.01840.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from training.export import READABLE, WEIGHTS

CONFIG = "config.json"
LEAST_LAYERS = 6
_SAVED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
)


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers of the target whose inputs the head reads.

    Raises:
        ValueError: The target is too shallow.
    """
    if num_layers < LEAST_LAYERS:
        raise ValueError(f"the target has {num_layers} layers; a head needs one of {LEAST_LAYERS} or more")
    return 2, num_layers // 2, num_layers - 3


class Unrolled:
    """The attention of training, where all chains of a row are drafted at once.

    In step s the chain that started at pair i - s has come to pair i. It sees the pairs up to its start as step 0
    left them, and after its start only its own:

        step 2, P = 5     keys of step 0    step 1    step 2
        pair 2            0                 1         2
        pair 3            0 1               2         3
        pair 4            0 1 2             3         4

    Pairs before s have no chain in step s. What comes out for them is finite and means nothing.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def attend(self, q_BHPD: Tensor, k_BHPD: Tensor, v_BHPD: Tensor) -> Tensor:
        """Attends in the next step."""
        self.steps.append((k_BHPD, v_BHPD))
        step, (first_k_BHPD, first_v_BHPD) = len(self.steps) - 1, self.steps[0]
        if step == 0:
            return functional.scaled_dot_product_attention(q_BHPD, k_BHPD, v_BHPD, is_causal=True)
        q_BHPD = q_BHPD * q_BHPD.shape[-1] ** -0.5
        num_pairs = q_BHPD.shape[-2]
        visible_PP = torch.ones(num_pairs, num_pairs, dtype=torch.bool, device=q_BHPD.device).tril(-step)
        scores = [(q_BHPD @ first_k_BHPD.transpose(-1, -2)).masked_fill(~visible_PP, -torch.inf)]
        own = [(k.roll(step - s, -2), v.roll(step - s, -2)) for s, (k, v) in enumerate(self.steps) if s > 0]
        scores += [(q_BHPD * k_BHPD).sum(-1, keepdim=True) for k_BHPD, _ in own]
        shares = torch.cat(scores, dim=-1).softmax(-1).to(v_BHPD.dtype)
        y_BHPD = shares[..., :num_pairs] @ first_v_BHPD
        for place, (_, own_v_BHPD) in enumerate(own, start=num_pairs):
            y_BHPD = y_BHPD + shares[..., place, None] * own_v_BHPD
        return y_BHPD


class Attention(nn.Module):
    """Grouped-query attention over pairs, whose inputs are twice as wide as its outputs."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.head_dim
        assert config.num_key_value_heads
        self.head_dim, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        width, kv_width = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_BPC: Tensor, turns: tuple[Tensor, Tensor], memory: Unrolled) -> Tensor:
        """Attends in the next step of the memory."""
        batch, pairs, _ = x_BPC.shape
        q_BHPD, k_BNPD, v_BNPD = (
            project(x_BPC).view(batch, pairs, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHPD, k_BNPD = apply_rotary_pos_emb(q_BHPD, k_BNPD, *turns)
        k_BHPD, v_BHPD = (each.repeat_interleave(self.groups, 1) for each in (k_BNPD, v_BNPD))
        y_BHPD = memory.attend(q_BHPD, k_BHPD, v_BHPD)
        y_BPE: Tensor = self.o_proj(y_BHPD.transpose(1, 2).reshape(batch, pairs, -1))
        return y_BPE


class Midlayer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)


class Head(nn.Module):
    """The draft head.

    Args:
        config: Its sizes; width and vocabulary are those of the target.
        drafted_W: The ids of the target's vocabulary that it can draft, rising.
    """

    def __init__(self, config: LlamaConfig, drafted_W: Tensor) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(drafted_W), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        reachable_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        reachable_V[drafted_W] = True
        self.register_buffer("d2t", drafted_W - torch.arange(len(drafted_W)))
        self.register_buffer("t2d", reachable_V)
        self.register_buffer("tap_rms_C", torch.ones(3 * width), persistent=False)

    def drafted_ids(self) -> Tensor:
        """The ids of the target's vocabulary that the head can draft."""
        offsets_W = self.get_buffer("d2t")
        return offsets_W + torch.arange(len(offsets_W), device=offsets_W.device)

    @torch.no_grad()
    def scale_taps(self, rms_C: Tensor) -> None:
        """Divides each channel of the taps by its size before `fc`, without a change of the function.

        A residual stream is large and uneven. Read as it is, it would drown what the layer adds to it.
        """
        self.fc.weight *= rms_C / self.get_buffer("tap_rms_C")
        self.get_buffer("tap_rms_C").copy_(rms_C)

    def start_from(self, norm_E: Tensor, rows_VE: Tensor) -> None:
        """Starts from random matrices and the target's last norm and output head."""
        for name, parameter in self.named_parameters():
            if not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=0.02)
        with torch.no_grad():
            self.norm.weight.copy_(norm_E)
            self.lm_head.weight.copy_(rows_VE[self.drafted_ids()])

    def features(self, taps_BPC: Tensor) -> Tensor:
        """Returns what takes the place of the states h where the target has been."""
        f_BPE: Tensor = self.fc(taps_BPC / self.get_buffer("tap_rms_C").to(taps_BPC.dtype))
        return f_BPE

    def states(self, f_BPE: Tensor, embeddings_BPE: Tensor, memory: Unrolled) -> Tensor:
        """Returns the states h of the pairs of a row."""
        layer = self.midlayer
        turns = self.rotary(f_BPE, torch.arange(f_BPE.shape[1], device=f_BPE.device)[None])
        x_BPC = torch.cat((layer.input_layernorm(embeddings_BPE), layer.hidden_norm(f_BPE)), dim=-1)
        h_BPE = f_BPE + layer.self_attn(x_BPC, turns, memory)
        out_BPE: Tensor = h_BPE + layer.mlp(layer.post_attention_layernorm(h_BPE))
        return out_BPE

    def logits(self, h_BPE: Tensor) -> Tensor:
        """Returns the scores of the tokens after the pairs, over the drafted vocabulary."""
        logits_BPW: Tensor = self.lm_head(self.norm(h_BPE))
        return logits_BPW

    def unroll(self, taps_BPC: Tensor, embeddings_BPE: Tensor, num_steps: int) -> list[Tensor]:
        """Drafts from every pair at once.

        Args:
            taps_BPC: The three taps of the target, one after the other in the last dimension.
            embeddings_BPE: Embeddings of the tokens one position later.
            num_steps: How far to draft.

        Returns:
            The logits of each step. In step s the entry of pair i belongs to the chain that started at pair i - s;
            the first s entries mean nothing.
        """
        memory, logits = Unrolled(), []
        f_BPE = self.features(taps_BPC)
        for _ in range(num_steps):
            h_BPE = self.states(f_BPE, embeddings_BPE, memory)
            logits.append(self.logits(h_BPE))
            f_BPE = h_BPE.roll(1, dims=1)
        return logits


def save_head(head: Head, folder: Path) -> None:
    """Writes the tensors as bf16, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    state = head.state_dict()
    state["fc.weight"] = state["fc.weight"] / head.get_buffer("tap_rms_C")
    for name, value in state.items():
        state[name] = (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().cpu()
    partial = folder / "partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(READABLE)
    partial.replace(folder / WEIGHTS)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(head.config, name) for name in _SAVED},
        "rope_theta": (head.config.rope_parameters or {})["rope_theta"],
        "draft_vocab_size": len(head.get_buffer("d2t")),
        "dtype": "bfloat16",
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path) -> Head:
    """Reads a saved head, in float32 with the rounded values."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    state = load_file(folder / WEIGHTS)
    head = Head(LlamaConfig(**{name: config[name] for name in _SAVED}), state["t2d"].nonzero().flatten())
    head.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    return head

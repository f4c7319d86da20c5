"""An EAGLE-3 draft head for training on a CPU, with the tensor names of the public checkpoints.

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

from training.export import READABLE, WEIGHTS
from training.model import FeedForward, RMSNorm, Shape, rope_tables, rotate
from training.tokenizer import CONTEXT

CONFIG = "config.json"
LEAST_LAYERS = 6


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

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x_BPC: Tensor, cos_PD: Tensor, sin_PD: Tensor, memory: Unrolled) -> Tensor:
        """Attends in the next step of the memory."""
        batch, pairs, _ = x_BPC.shape
        split = (batch, pairs, -1, self.shape.head_dim)
        groups = self.shape.heads // self.shape.kv_heads
        q_BHPD = rotate(self.q_proj(x_BPC).view(split).transpose(1, 2), cos_PD, sin_PD)
        k_BHPD = rotate(self.k_proj(x_BPC).view(split).transpose(1, 2), cos_PD, sin_PD).repeat_interleave(groups, 1)
        v_BHPD = self.v_proj(x_BPC).view(split).transpose(1, 2).repeat_interleave(groups, 1)
        y_BHPD = memory.attend(q_BHPD, k_BHPD, v_BHPD)
        y_BPE: Tensor = self.o_proj(y_BHPD.transpose(1, 2).reshape(batch, pairs, -1))
        return y_BPE


class Midlayer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = FeedForward(shape)


class Head(nn.Module):
    """The draft head.

    Args:
        shape: Its sizes; the width is that of the target.
        drafted_W: The ids of the target's vocabulary that it can draft, rising.
        vocabulary: Size of the target's vocabulary.
    """

    def __init__(self, shape: Shape, drafted_W: Tensor, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, len(drafted_W), bias=False)
        reachable_V = torch.zeros(vocabulary, dtype=torch.bool)
        reachable_V[drafted_W] = True
        self.register_buffer("d2t", drafted_W - torch.arange(len(drafted_W)))
        self.register_buffer("t2d", reachable_V)
        cos_TD, sin_TD = rope_tables(shape, CONTEXT)
        self.register_buffer("tap_rms_C", torch.ones(3 * shape.hidden), persistent=False)
        self.register_buffer("cos_TD", cos_TD, persistent=False)
        self.register_buffer("sin_TD", sin_TD, persistent=False)

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
        layer, last = self.midlayer, f_BPE.shape[1]
        cos_PD = self.get_buffer("cos_TD")[:last].to(f_BPE.dtype)
        sin_PD = self.get_buffer("sin_TD")[:last].to(f_BPE.dtype)
        x_BPC = torch.cat((layer.input_layernorm(embeddings_BPE), layer.hidden_norm(f_BPE)), dim=-1)
        h_BPE = f_BPE + layer.self_attn(x_BPC, cos_PD, sin_PD, memory)
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
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": CONTEXT,
        "vocab_size": len(head.get_buffer("t2d")),
        "draft_vocab_size": len(head.get_buffer("d2t")),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path) -> Head:
    """Reads a saved head, in float32 with the rounded values."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    shape = Shape(
        hidden=config["hidden_size"],
        layers=1,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        intermediate=config["intermediate_size"],
        tied=False,
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    state = load_file(folder / WEIGHTS)
    drafted_W = state["t2d"].nonzero().flatten()
    head = Head(shape, drafted_W, config["vocab_size"])
    head.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    return head

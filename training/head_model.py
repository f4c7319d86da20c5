"""Draft heads for training, with the tensor names of the public checkpoints: EAGLE-3's, and DSpark's of one pass.

What it does: the layers that read taps of a target and draft from them, all chains of a row at once, and the saved
forms.
What it does not do: know about losses, optimisers or sampling.

Shapes: B rows, P pairs, A chains, S drafting steps, T = P + A * S, E width of the target, R of the Markov head, W
drafted vocabulary. Pair i joins the taps of position i with the token at i + 1; a chain that starts there drafts the
token at i + 2 first.

Source: Li et al. 2025, arXiv:2503.01840 (EAGLE-3); arXiv:2607.05147 (DSpark); `speculators` 0.6.
"""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

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
_LAYER, _KIND = "transformer_layer_config", "speculators_model_type"
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_BLOCK_SIZES = "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "markov_rank"


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
    """Grouped-query attention, whose inputs may be wider than its outputs."""

    def __init__(self, config: LlamaConfig, columns: int) -> None:
        super().__init__()
        assert config.head_dim
        assert config.num_key_value_heads
        self.head_dim, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        width, kv_width = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(columns, width, bias=False)
        self.k_proj = nn.Linear(columns, kv_width, bias=False)
        self.v_proj = nn.Linear(columns, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()

    def project(self, x_BTC: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values (B, H, T, D)."""
        q_BTHD, k_BTND, v_BTND = (
            made(x_BTC).unflatten(-1, (-1, self.head_dim)) for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTD, k_BNTD = (part.transpose(1, 2) for part in (self.q_norm(q_BTHD), self.k_norm(k_BTND)))
        q_BHTD, k_BNTD = apply_rotary_pos_emb(q_BHTD, k_BNTD, *turns)
        return q_BHTD, *(part.repeat_interleave(self.groups, 1) for part in (k_BNTD, v_BTND.transpose(1, 2)))

    def output(self, y_BHTD: Tensor) -> Tensor:
        """Returns what the layer adds (B, T, E)."""
        y_BTE: Tensor = self.o_proj(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTE


class Layer(nn.Module):
    """A decoder layer of a head: of pairs, with a norm of their hidden state, or of blocks, with norms of heads."""

    def __init__(self, config: LlamaConfig, *, of_pairs: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.self_attn = Attention(config, 2 * width if of_pairs else width)
        if of_pairs:
            self.hidden_norm = LlamaRMSNorm(width, eps)
        else:
            attention = self.self_attn
            attention.q_norm, attention.k_norm = (LlamaRMSNorm(attention.head_dim, eps) for _ in range(2))
        self.mlp = LlamaMLP(config)

    def forward(self, x_BTE: Tensor, y_BHTD: Tensor) -> Tensor:
        """Returns the stream behind the layer, from that before it and what it attended to."""
        h_BTE = x_BTE + self.self_attn.output(y_BHTD)
        out_BTE: Tensor = h_BTE + self.mlp(self.post_attention_layernorm(h_BTE))
        return out_BTE


class Head(nn.Module, ABC):
    """A draft head.

    Args:
        config: Its sizes; width and vocabulary are those of the target.
        drafted_W: The ids of the target's vocabulary that it can draft, rising.
        embedding_VE: That of the target.
    """

    chains_per_row: int | None = None
    """How many chains of a row a step of training drafts; None for one from every pair."""

    def __init__(self, config: LlamaConfig, drafted_W: Tensor, embedding_VE: Tensor) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(drafted_W), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        reachable_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        reachable_V[drafted_W] = True
        self.register_buffer("d2t", drafted_W - torch.arange(len(drafted_W)))
        self.register_buffer("t2d", reachable_V)
        self.register_buffer("tap_rms_C", torch.ones(3 * width), persistent=False)
        self.register_buffer("embedding_VE", embedding_VE.float(), persistent=False)

    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """Returns the config.json of the public layout."""

    @abstractmethod
    def unroll(self, taps_BPC: Tensor, ids_BP: Tensor, starts_A: Tensor, num_steps: int) -> list[Tensor]:
        """Drafts several chains of every row at once.

        Args:
            taps_BPC: The three taps of the target, one after the other in the last dimension.
            ids_BP: Tokens one position later.
            starts_A: The pairs at which chains start.
            num_steps: How far to draft; steps behind the last pair mean nothing.

        Returns:
            The logits (B, A, W) of each step.
        """

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
        """Returns what a head reads of the target (B, P, E)."""
        f_BPE: Tensor = self.fc(taps_BPC / self.get_buffer("tap_rms_C").to(taps_BPC.dtype))
        return f_BPE

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the target's embeddings of tokens."""
        return functional.embedding(ids, self.get_buffer("embedding_VE"))

    def logits(self, h_BAE: Tensor) -> Tensor:
        """Returns scores over the drafted vocabulary."""
        logits_BAW: Tensor = self.lm_head(self.norm(h_BAE))
        return logits_BAW


class EagleHead(Head):
    """A head of EAGLE-3: one layer, which drafts further tokens from its own states."""

    def __init__(self, config: LlamaConfig, *vocabulary: Tensor) -> None:
        super().__init__(config, *vocabulary)
        self.midlayer = Layer(config, of_pairs=True)

    def layout(self) -> dict[str, Any]:
        """See `Head`."""
        sizes = {name: getattr(self.config, name) for name in _SIZES}
        rope_theta = (self.config.rope_parameters or {})["rope_theta"]
        return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes, "rope_theta": rope_theta}

    def states(self, f_BPE: Tensor, embeddings_BPE: Tensor, memory: Unrolled) -> Tensor:
        """Returns the states of the pairs of a row, from features or the states before."""
        layer = self.midlayer
        turns = self.rotary(f_BPE, torch.arange(f_BPE.shape[1], device=f_BPE.device)[None])
        x_BPC = torch.cat((layer.input_layernorm(embeddings_BPE), layer.hidden_norm(f_BPE)), dim=-1)
        h_BPE: Tensor = layer(f_BPE, memory.attend(*layer.self_attn.project(x_BPC, turns)))
        return h_BPE

    def unroll(self, taps_BPC: Tensor, ids_BP: Tensor, starts_A: Tensor, num_steps: int) -> list[Tensor]:
        """See `Head`."""
        memory, logits = Unrolled(), []
        f_BPE, embeddings_BPE = self.features(taps_BPC), self.embed(ids_BP)
        for step in range(num_steps):
            h_BPE = self.states(f_BPE, embeddings_BPE, memory)
            logits.append(self.logits(h_BPE[:, (starts_A + step).clamp(max=ids_BP.shape[1] - 1)]))
            f_BPE = h_BPE.roll(1, dims=1)
        return logits


class Markov(nn.Module):
    """The recurrent Markov head: scores of what follows a token, by those before it and the hidden state."""

    def __init__(self, config: LlamaConfig, num_drafted: int) -> None:
        super().__init__()
        rank: int = config.markov_rank
        self.markov_w1, self.markov_w2 = nn.Embedding(config.vocab_size, rank), nn.Linear(rank, num_drafted, bias=False)
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def forward(self, ids_BA: Tensor, h_BAE: Tensor, state_BAR: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns them (B, A, W), and the next state."""
        inner_BAR = self.markov_w1(ids_BA)
        state_BAR = torch.zeros_like(inner_BAR) if state_BAR is None else state_BAR
        joined = self.joint_proj(torch.cat((state_BAR, inner_BAR, h_BAE), dim=-1))
        gate_BAR, candidate_BAR, inner_BAR = joined.chunk(3, dim=-1)
        state_BAR = torch.lerp(candidate_BAR.tanh(), state_BAR.to(joined.dtype), gate_BAR.sigmoid())
        return self.markov_w2(inner_BAR.tanh()), state_BAR


class BlockHead(Head):
    """A head of DSpark: layers over a block of the newest token and masks, which see the taps before it."""

    chains_per_row = 64

    def __init__(self, config: LlamaConfig, *vocabulary: Tensor) -> None:
        super().__init__(config, *vocabulary)
        self.layers = nn.ModuleList(Layer(config, of_pairs=False) for _ in range(config.num_hidden_layers))
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = Markov(config, len(vocabulary[0]))

    def layout(self) -> dict[str, Any]:
        """See `Head`."""
        sizes = {name: getattr(self.config, name) for name in _SIZES}
        of_blocks = {name: getattr(self.config, name) for name in _BLOCK_SIZES}
        return {_KIND: "dspark", _LAYER: {"model_type": "qwen3", **sizes}, **of_blocks, "markov_head_type": "rnn"}

    @torch.no_grad()
    def start_from(self, norm_E: Tensor, rows_VE: Tensor) -> None:
        """Starts the Markov head from the directions in which tokens differ most."""
        super().start_from(norm_E, rows_VE)
        markov, table_VE = self.markov_head, self.get_buffer("embedding_VE")
        for weight_VR, of_VE in ((markov.markov_w1.weight, table_VE), (markov.markov_w2.weight, self.lm_head.weight)):
            _, _, directions_ER = torch.svd_lowrank(of_VE.float(), weight_VR.shape[1])
            weight_VR.copy_(functional.normalize(of_VE.float(), dim=-1) @ directions_ER)

    def unroll(self, taps_BPC: Tensor, ids_BP: Tensor, starts_A: Tensor, num_steps: int) -> list[Tensor]:
        """See `Head`."""
        num_pairs, num_chains, device = ids_BP.shape[1], len(starts_A), ids_BP.device
        pairs_P, steps_S = torch.arange(num_pairs, device=device), torch.arange(num_steps, device=device)
        chains_T = torch.arange(num_chains, device=device).repeat_interleave(num_steps)
        sees_TT = torch.cat((pairs_P <= starts_A[chains_T, None], chains_T == chains_T[:, None]), dim=1)
        context_BPE = self.hidden_norm(self.features(taps_BPC))
        masks_BAS = torch.full((len(ids_BP), num_chains, num_steps - 1), self.config.mask_token_id, device=device)
        x_BTE = self.embed(torch.cat((ids_BP[:, starts_A, None], masks_BAS), dim=2).flatten(1))
        positions_T = torch.cat((pairs_P, (starts_A[:, None] + 1 + steps_S).flatten()))
        turns = self.rotary(x_BTE, positions_T[None])
        for layer in self.layers:
            both_BTE = torch.cat((context_BPE, layer.input_layernorm(x_BTE)), dim=1)
            q_BHTD, k_BHTD, v_BHTD = layer.self_attn.project(both_BTE, turns)
            x_BTE = layer(x_BTE, functional.scaled_dot_product_attention(
                q_BHTD[:, :, num_pairs:], k_BHTD, v_BHTD, attn_mask=sees_TT))  # fmt: skip
        h_BASE, state_BAR, logits = self.norm(x_BTE).unflatten(1, (num_chains, num_steps)), None, []
        for step in range(num_steps):
            ids_BA, h_BAE = ids_BP[:, (starts_A + step).clamp(max=num_pairs - 1)], h_BASE[:, :, step]
            follows_BAW, state_BAR = self.markov_head(ids_BA, h_BAE, state_BAR)
            logits.append(self.lm_head(h_BAE) + follows_BAW)
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
    config = head.layout() | {"draft_vocab_size": len(head.get_buffer("d2t")), "dtype": "bfloat16"}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path, embedding_VE: Tensor) -> Head:
    """Reads a saved head, in float32 with the rounded values."""
    content, state = json.loads((folder / CONFIG).read_text(encoding="utf-8")), load_file(folder / WEIGHTS)
    made, names = (BlockHead, _BLOCK_SIZES) if _KIND in content else (EagleHead, ())
    sizes = {name: content.get(_LAYER, content)[name] for name in _SIZES} | {name: content[name] for name in names}
    head = made(LlamaConfig(**sizes), state["t2d"].nonzero().flatten(), embedding_VE)
    head.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    return head


@torch.no_grad()
def pruned(head: EagleHead, drafted_W: Tensor, intermediate: int) -> EagleHead:
    """Returns a smaller head: of these drafted tokens, all among the head's, and its strongest MLP units."""
    state, mlp = head.state_dict(), head.midlayer.mlp
    strength_I = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
    units_I = strength_I.topk(intermediate).indices.sort().values
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        place = f"midlayer.mlp.{name}.weight"
        state[place] = state[place].index_select(dim, units_I)
    state["lm_head.weight"] = state["lm_head.weight"][torch.isin(head.drafted_ids(), drafted_W)]
    sizes = {name: getattr(head.config, name) for name in _SIZES} | {"intermediate_size": intermediate}
    made = EagleHead(LlamaConfig(**sizes), drafted_W, head.get_buffer("embedding_VE"))
    made.load_state_dict(state | {name: made.get_buffer(name) for name in ("d2t", "t2d")})
    return made

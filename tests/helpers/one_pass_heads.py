"""Small heads of one pass in all public layouts, and a reference of what they compute, written from their definitions.

Shapes: L tokens of a text, C = L - 1 of them with taps, T = C and those of the block, N of them that are kept, E width,
X taps, D drafted tokens, V vocabulary, S width of the Markov head.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.helpers import models
from tests.helpers.draft_heads import inspect_pair, norm, turned

if TYPE_CHECKING:
    from llama_ssp.extensions.heads.sources import HeadSource
    from llama_ssp.weights.checkpoint import Checkpoint

WIDTH, HEADS, KEYS, DIM, UNITS, VOCABULARY, DRAFTED, MASK, RANK = 64, 4, 2, 16, 96, 224, 112, 220, 16
LAYERS, FOUR_LAYERS = (1, 2, 4), (1, 2, 3, 4)
_LAYER = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "intermediate_size": UNITS,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 2048,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "attention_bias": False,
}
_SPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": MASK,
    "markov_rank": RANK,
    "target_layer_ids": [layer - 1 for layer in FOUR_LAYERS],
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_SPECULATOR = {"transformer_layer_config": _LAYER | {"model_type": "llama"}, "draft_vocab_size": DRAFTED}
CONFIGS: dict[str, dict[str, Any]] = {
    "peagle": {
        **_SPECULATOR,
        "speculators_model_type": "peagle",
        "mask_token_id": MASK,
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": [*FOUR_LAYERS],
        "norm_before_residual": True,
    },
    "peagle of the authors": {
        **_LAYER,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFTED,
        "ptd_token_id": MASK,
        "eagle_aux_hidden_state_layer_ids": [*LAYERS],
    },
    "dflash": {
        **_SPECULATOR,
        "speculators_model_type": "dflash",
        "mask_token_id": MASK,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [*LAYERS],
    },
    "dflash of its authors": {
        **_LAYER,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "block_size": 5,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3]},
    },
    "dspark": {
        **_SPECULATOR,
        "speculators_model_type": "dspark",
        "mask_token_id": MASK,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [*LAYERS],
        "markov_rank": RANK,
        "markov_head_type": "gated",
    },
    "dflash of DeepSpec": {
        **_LAYER,
        **_SPARK,
        "model_type": "qwen3",
        "markov_rank": 0,
        "confidence_head_with_markov": False,
    },
    "dspark of DeepSpec": {**_LAYER, **_SPARK, "model_type": "qwen3", "markov_head_type": "vanilla"},
    "dspark of SpecForge": {
        **_LAYER,
        "model_type": "qwen3",
        "architectures": ["DSparkDraftModel"],
        "block_size": 4,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [0, 1, 3],
            "projector_type": "dspark",
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "confidence_head_alpha": 1.0,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    },
    "dflash 2 of its authors": {
        **_LAYER,
        "model_type": "qwen3",
        "architectures": ["DFlash2DraftModel"],
        "block_size": 5,
        "is_causal": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
        "use_sliding_window": True,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [0, 1, 3],
            "selector_rank": RANK,
            "selector_top_k": 40,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
        },
    },
    "recurrent dspark": {**_LAYER, **_SPARK, "model_type": "qwen3", "markov_head_type": "rnn"},
}
"""By layout, the config.json of a head."""
SHARING, SELECTING, FORGED = "dflash of its authors", "dflash 2 of its authors", "dspark of SpecForge"
"""Layouts that have neither embedding nor output."""
CONFIDENT = [layout for layout in CONFIGS if "dspark" in layout or "DeepSpec" in layout]
"""Layouts with a confidence head: of one it reads hidden states alone."""


_Convolve = Callable[[Tensor], Callable[[Tensor, int], Tensor]]


def make_tensors(layout: str, *, seed: int = 0) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in _shapes(layout).items():
        scale = 4.0 if "codebook" in name or "base_kernel" in name else 1.0
        scale = {"mask_hidden": 8.0, "lm_head.weight": 3.0, "markov_head.markov_w2.weight": 3.0}.get(name, scale)
        found[name] = scale * torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + ("norm" in name)
    if layout in CONFIDENT:  # estimates that depend on the token before
        found["confidence_head.proj.weight"][:, WIDTH:] *= 12
        found["confidence_head.proj.bias"] *= 0.1
    if "draft_vocab_size" in CONFIGS[layout]:
        drafted_D = torch.arange(DRAFTED) * 2
        found["d2t"] = drafted_D - torch.arange(DRAFTED)
        found["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, drafted_D, value=True)
    return found


def _shapes(layout: str) -> dict[str, tuple[int, ...]]:
    config, num_taps, is_block = CONFIGS[layout], len(taps_of(layout)), "peagle" not in layout
    found: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, num_taps * WIDTH), "norm.weight": (WIDTH,)}
    for number in range(2):
        columns = WIDTH * (1 if is_block or number else 2)
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if columns > WIDTH else [])]
        found |= {
            f"layers.{number}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * DIM, columns),
                "self_attn.k_proj": (KEYS * DIM, columns),
                "self_attn.v_proj": (KEYS * DIM, columns),
                "self_attn.o_proj": (WIDTH, HEADS * DIM),
                "mlp.gate_proj": (UNITS, WIDTH),
                "mlp.up_proj": (UNITS, WIDTH),
                "mlp.down_proj": (WIDTH, UNITS),
                **dict.fromkeys(norms, (WIDTH,)),
                **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm") if is_block else (), (DIM,)),
            }.items()
        }
    found |= {"hidden_norm.weight": (WIDTH,)} if is_block else {"mask_hidden": (1, 1, num_taps * WIDTH)}
    if config.get("fc_norm"):
        found |= {f"fc_norm.{tap}.weight": (WIDTH,) for tap in range(num_taps)}
    num_drafted = config.get("draft_vocab_size", VOCABULARY)
    if layout == SELECTING:
        books = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
        found |= dict.fromkeys(books, (VOCABULARY, RANK)) | {
            "candidate_selector.hidden_projection.weight": (RANK, WIDTH)
        }
        for each in (f"layers.{number}.{part}_conv" for number in range(2) for part in ("attention", "mlp")):
            found |= {f"{each}.base_kernel": (2, 2, WIDTH), f"{each}.kernel_projection.weight": (4 * 4, WIDTH)}
    if layout not in {SHARING, SELECTING, FORGED}:
        found |= {"embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (num_drafted, WIDTH)}
    if config.get("markov_rank") or layout == FORGED:
        place = "markov_head.{}".format
        found |= {place("markov_w1.weight"): (VOCABULARY, RANK), place("markov_w2.weight"): (num_drafted, RANK)}
        inner = {"gated": ("gate", 1, 1), "rnn": ("joint", 3, 2)}.get(config.get("markov_head_type", ""))
        if inner:
            name, rows, columns = inner
            found[place(f"{name}_proj.weight")] = rows * RANK, columns * RANK + WIDTH
            found[place(f"{name}_proj.bias")] = (rows * RANK,)
    if layout in CONFIDENT:
        found["confidence_head.proj.weight"] = (1, WIDTH + RANK * (layout != "dflash of DeepSpec"))
        found["confidence_head.proj.bias"] = (1,)
    return found


def taps_of(layout: str) -> tuple[int, ...]:
    """The layers whose inputs a head taps."""
    return FOUR_LAYERS if layout == "peagle" or "DeepSpec" in layout or "recurrent" in layout else LAYERS


def save_head(folder: Path, layout: str, tensors: Mapping[str, Tensor] | None = None, **changed: Any) -> Path:
    """Save a head in a layout; fields of its config.json may be changed, or left out with None."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors or make_tensors(layout)), folder / "model.safetensors")
    config = {name: value for name, value in (CONFIGS[layout] | changed).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def save_pair(
    folder: Path, layout: str, *, likely: int = VOCABULARY, **changed: Any
) -> "tuple[Checkpoint, HeadSource]":
    """Save a target of six layers, and a head for it; both mostly choose the first `likely` tokens."""
    models.build_checkpoint(
        folder / "target", "llama", hidden_size=WIDTH, head_dim=DIM, vocab_size=VOCABULARY, num_hidden_layers=6
    )
    files = save_head(folder / "head", layout, **changed), folder / "target"
    for file in [path / "model.safetensors" for path in files] if likely < VOCABULARY else ():
        tensors = load_file(file)
        for name in {"lm_head.weight", "markov_head.markov_w2.weight"} & tensors.keys():
            tensors[name][likely * len(tensors[name]) // VOCABULARY :] *= 0.01
        save_file(tensors, file, metadata={"format": "pt"})
    return inspect_pair(folder)


def reference(  # noqa: PLR0913
    layout: str,
    tensors: Mapping[str, Tensor],
    text: Sequence[int],
    taps_CX: Tensor,
    drafted: Sequence[int],
    *,
    num_drafted: int,
    table_VE: Tensor,
    output_VE: Tensor,
    skipped: range = range(0),
    of_confidence: bool = False,
) -> Tensor:
    """Logits (V,) of the token behind a text and some drafted ones, of a pass that drafts so many.

    With `of_confidence` the logit (1,) of its acceptance in their place.
    `table_VE` and `output_VE` are those of the target. A block does not see the `skipped` positions.
    """
    config, found = CONFIGS[layout], {name: tensor.double() for name, tensor in tensors.items()}
    table_VE, output_DE = (
        found.get(name, of.double()) for name, of in (("embed_tokens.weight", table_VE), ("lm_head.weight", output_VE))
    )
    at_anchor, depth = "dspark" in layout or "DeepSpec" in layout, len(drafted)
    if "peagle" in layout:
        mask_X = found["mask_hidden"].flatten()
        x_TX = torch.cat([taps_CX.double(), mask_X.expand(num_drafted - 1, -1)])
        x_NE = _pairs(found, config, table_VE[[*text[1:], *[MASK] * (num_drafted - 1)]], x_TX)[-num_drafted:]
    else:
        num_masks = num_drafted - at_anchor
        context_CE = norm(taps_CX.double() @ found["fc.weight"].T, found["hidden_norm.weight"])
        x_NE = _block(found, table_VE[[text[-1], *[MASK] * num_masks]], context_CE, layout, skipped)[-num_drafted:]
    normed_NE = norm(x_NE, found["norm.weight"])
    if of_confidence:
        weight_1F, features_F = found["confidence_head.proj.weight"], normed_NE[depth]
        if weight_1F.shape[1] > WIDTH:
            features_F = torch.cat([features_F, found["markov_head.markov_w1.weight"][[text[-1], *drafted][-1]]])
        return weight_1F @ features_F + found["confidence_head.proj.bias"]
    logits_D = output_DE @ normed_NE[depth]
    if config.get("markov_rank") or layout == FORGED:
        logits_D = logits_D + _follows(found, config, [text[-1], *drafted], normed_NE)
    if layout == SELECTING:
        named = {name.removeprefix("candidate_selector."): tensor for name, tensor in found.items()}
        context_S = named["predecessor_codebook"][[text[-1], *drafted][-1]]
        context_S = context_S * (named["hidden_projection.weight"] @ normed_NE[depth])
        others_D = torch.ones(VOCABULARY, dtype=torch.bool).index_fill_(0, logits_D.topk(40).indices, value=False)
        logits_D = (logits_D + named["successor_codebook"] @ context_S).masked_fill(others_D, float("-inf"))
    if "d2t" not in tensors:
        return logits_D
    drafted_D = torch.arange(DRAFTED) + tensors["d2t"]
    nowhere_V = torch.full((VOCABULARY,), float("-inf"), dtype=torch.float64)
    return nowhere_V.index_copy_(0, drafted_D, logits_D)


def _follows(found: Mapping[str, Tensor], config: Mapping[str, Any], ids: list[int], normed_NE: Tensor) -> Tensor:
    state_S, inner_S = torch.zeros(RANK, dtype=torch.float64), torch.zeros(0)
    weights = {name.removeprefix("markov_head."): tensor for name, tensor in found.items()}
    for token, normed_E in zip(ids, normed_NE, strict=False):
        inner_S = weights["markov_w1.weight"][token]
        if config.get("markov_head_type") == "gated":
            gate_S = weights["gate_proj.weight"] @ torch.cat([normed_E, inner_S]) + weights["gate_proj.bias"]
            inner_S = gate_S.sigmoid() * inner_S
        elif config.get("markov_head_type") == "rnn":
            joined = weights["joint_proj.weight"] @ torch.cat([state_S, inner_S, normed_E]) + weights["joint_proj.bias"]
            gate_S, candidate_S, inner_S = joined.chunk(3)
            state_S = gate_S.sigmoid() * state_S + (1 - gate_S.sigmoid()) * candidate_S.tanh()
            inner_S = inner_S.tanh()
    return weights["markov_w2.weight"] @ inner_S


def _pairs(found: Mapping[str, Tensor], config: Mapping[str, Any], embedded_TE: Tensor, x_TX: Tensor) -> Tensor:
    if config.get("fc_norm"):
        parts = x_TX.split(WIDTH, dim=-1)
        x_TX = torch.cat([norm(part, found[f"fc_norm.{tap}.weight"]) for tap, part in enumerate(parts)], dim=-1)
    x_TE = x_TX @ found["fc.weight"].T
    sees_TT = torch.ones(len(x_TE), len(x_TE), dtype=torch.bool).tril()
    for number in range(2):
        place = f"layers.{number}"
        inputs_TE = norm(x_TE, found[f"{place}.{'input_layernorm' if number else 'hidden_norm'}.weight"])
        x_TE = inputs_TE if config.get("norm_before_residual") and not number else x_TE
        if not number:
            inputs_TE = torch.cat([norm(embedded_TE, found[f"{place}.input_layernorm.weight"]), inputs_TE], dim=-1)
        x_TE = _layer(found, place, x_TE, inputs_TE, inputs_TE, sees_NT=sees_TT)
    return x_TE


def _block(found: Mapping[str, Tensor], x_NE: Tensor, context_CE: Tensor, layout: str, skipped: range) -> Tensor:
    distance_NT = torch.arange(len(context_CE) + len(x_NE)) - torch.arange(len(x_NE))[:, None] - len(context_CE)
    for number in range(2):
        inputs_NE = norm(x_NE, found[f"layers.{number}.input_layernorm.weight"])
        sees_NT = torch.ones_like(distance_NT, dtype=torch.bool)
        sees_NT[:, skipped.start : skipped.stop] = False
        convolve: dict[str, Any] = {}
        if layout == SELECTING:
            sees_NT = sees_NT if number else distance_NT.abs() < CONFIGS[layout]["sliding_window"]
            convolve = {
                part: partial(_convolved, found, f"layers.{number}.{part}_conv") for part in ("attention", "mlp")
            }
        x_NE = _layer(
            found, f"layers.{number}", x_NE, inputs_NE, torch.cat([context_CE, inputs_NE]), sees_NT=sees_NT, **convolve
        )
    return x_NE


def _convolved(found: Mapping[str, Tensor], place: str, inputs_NE: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A convolution, first or second, whose factors these inputs give, position by position."""
    factors_N22G = (inputs_NE @ found[f"{place}.kernel_projection.weight"].T).view(-1, 2, 2, 4)

    def convolve(x_NE: Tensor, number: int) -> Tensor:
        rows = []
        for number_, factors_2G in enumerate(factors_N22G[:, number]):
            kernel_2E = found[f"{place}.base_kernel"][number] + factors_2G.repeat_interleave(16, dim=1)
            before_E = x_NE[number_ - 1] if number_ else torch.zeros_like(x_NE[0])
            rows.append(kernel_2E[0] * x_NE[number_] + kernel_2E[1] * before_E)
        return torch.stack(rows)

    return convolve


def _layer(
    found: Mapping[str, Tensor],
    place: str,
    x_NE: Tensor,
    inputs_NE: Tensor,
    read_TE: Tensor,
    *,
    sees_NT: Tensor,
    attention: _Convolve | None = None,
    mlp: _Convolve | None = None,
) -> Tensor:
    """Add attention of the last N of T positions, and the MLP; both between convolutions of some layouts."""
    if attention:
        convolve = attention(inputs_NE)
        inputs_NE = convolve(inputs_NE, 0)
        read_TE = torch.cat([read_TE[: -len(inputs_NE)], inputs_NE])
    weights = {name.removeprefix(f"{place}."): tensor for name, tensor in found.items()}

    def heads(name: str, inputs_TE: Tensor, number: int) -> Tensor:
        made_TND = (inputs_TE @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(1, (number, DIM))
        norm_D = weights.get(f"self_attn.{name}_norm.weight")
        made_NTD = (made_TND if norm_D is None else norm(made_TND, norm_D)).transpose(0, 1)
        return made_NTD if name == "v" else turned(made_NTD, first=len(read_TE) - len(inputs_TE))

    queries, keys, values = heads("q", inputs_NE, HEADS), heads("k", read_TE, KEYS), heads("v", read_TE, KEYS)
    keys, values = (part.repeat_interleave(HEADS // KEYS, 0) for part in (keys, values))
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=sees_NT)
    added_NE = attended.transpose(0, 1).flatten(1) @ weights["self_attn.o_proj.weight"].T
    x_NE = x_NE + (convolve(added_NE, 1) if attention else added_NE)
    inner = norm(x_NE, weights["post_attention_layernorm.weight"])
    if mlp:
        convolve = mlp(inner)
        inner = convolve(inner, 0)
    gate, up = (inner @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    added_NE = (functional.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
    return x_NE + (convolve(added_NE, 1) if mlp else added_NE)

"""Tiny checkpoints with MTP layers, in the layouts of the public definitions, and what these layers compute.

Shapes: L pairs, E width, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.edits import edit_config
from tests.helpers.models import FAMILIES, WINDOW, build_checkpoint, tiny_model

# By layout: the layer, the norms of token and hidden state, their product, and the last norm; m is the module.
_DEEPSEEK = tuple(f"model.layers.{{at}}{part}" for part in ("", ".enorm", ".hnorm", ".eh_proj", ".shared_head.norm"))
_MIMO_PARTS = ("", ".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm")
_MIMO = tuple(f"model.mtp_layers.{{m}}{part}" for part in _MIMO_PARTS)
_MIMO_V2 = tuple(f"model.mtp.layers.{{m}}{part}" for part in ("", ".enorm", ".hnorm", ".eh_proj", ".final_layernorm"))
_QWEN = ("mtp.layers.{m}", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_ERNIE_PARTS = ("block", "emb_norm", "hidden_norm", "linear_proj")
_ERNIE = (*(f"model.mtp_{part}.{{m}}" for part in _ERNIE_PARTS), "")
_GROUPED: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 48}
_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {name: size for name, size in FAMILIES["deepseek_v3"].items() if "dense" not in name},
    "exaone_moe": _GROUPED
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ernie4_5_moe": _GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "mimo_v2_flash": _GROUPED
    | {
        "num_key_value_heads": 2,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
}
_SAID = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "exaone_moe", "ernie4_5_moe"), "num_nextn_predict_layers"),
    "qwen3_5_text": "mtp_num_hidden_layers",
}
MTP_LAYOUTS = {
    "qwen2": _MIMO,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "exaone_moe": _QWEN,
    "ernie4_5_moe": _ERNIE,
    "mimo_v2_flash": _MIMO_V2,
}
_DENSE = {"exaone_moe", "ernie4_5_moe", "mimo_v2_flash"}
UNCHAINED = "mimo_v2_flash"
_OF_MIMO = {"model_type": "mimo", "auto_map": {"AutoConfig": "mimo.MiMoConfig"}}
_STORED_PARTS = {UNCHAINED: {"post_attention_layernorm": "pre_mlp_layernorm", "sinks": "attention_sink_bias"}}
Reference = Callable[[Tensor, Tensor], Tensor]


def save_with_mtp(folder: Path, family: str, *, num_modules: int = 1, **changes: Any) -> tuple[Any, Reference]:
    """Save a model with MTP layers; returns it, as the library holds it, and a reference of the layers.

    The reference maps embeddings of the tokens after L pairs and of later ones, and hidden states (L, E) of the target,
    to the logits (V,) after the last token. Module m reads the tokens m further and the output of the module before it,
    or the target's hidden states. After the last module each later pair has the output of the pair before it, so all
    are computed once more for each of them.
    """
    changes = _OTHER_SIZES.get(family, {}) | changes
    model: Any = build_checkpoint(folder, family, **changes)
    width, generator = model.config.hidden_size, torch.Generator().manual_seed(7)
    stored, modules = dict[str, Tensor](), list[Reference]()
    for module in range(num_modules):
        one = _one_layer(model, family, changes, seed=5 + module)
        one.save_pretrained(folder / f"module {module}")
        norms = [0.5 + torch.rand(width, generator=generator) for _ in range(2)]
        product = torch.randn(width, 2 * width, generator=generator) / width**0.5
        place = {"m": module, "at": model.config.num_hidden_layers + module}
        layer, *names = (name.format(**place) for name in MTP_LAYOUTS[family])
        of_files = product.roll(width, 1) if family == "qwen2" else product
        last = one.get_decoder().norm.weight.detach().clone()
        parts = zip(names, [*norms, of_files, last], strict=True)
        stored |= {f"{name}.weight": tensor for name, tensor in parts if name}
        prefix = "model.layers.0."
        for name, tensor in load_file(folder / f"module {module}" / "model.safetensors").items():
            for ours, theirs in _STORED_PARTS.get(family, {}).items():
                name = name.replace(ours, theirs)  # noqa: PLW2901 - as its files have it
            stored |= {f"{layer}.{name.removeprefix(prefix)}": tensor} if name.startswith(prefix) else {}
        if MTP_LAYOUTS[family] is _DEEPSEEK:  # copies, as the published files have them
            stored[f"{layer}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
            stored[f"{layer}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        modules.append(_module(one, norms, product))
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors", metadata={"format": "pt"})
    said = {_SAID.get(family, "mtp_num_hidden_layers"): num_modules} if family != UNCHAINED else {}
    edit_config(folder, **_OF_MIMO | {"num_nextn_predict_layers": num_modules} if family == "qwen2" else said)

    def reference(embedded_LE: Tensor, hidden_LE: Tensor) -> Tensor:
        number, target_LE = len(hidden_LE), hidden_LE
        num_further = len(embedded_LE) - number
        for place, module in enumerate(modules[: 1 + num_further]):
            read_LE = target_LE if family == UNCHAINED else hidden_LE
            hidden_LE = module(embedded_LE[place : place + number], read_LE)
        if num_further >= num_modules:
            first_LE = embedded_LE[num_modules - 1 :]
            while len(read_LE) < len(first_LE):
                read_LE = torch.cat([read_LE, hidden_LE[-1:]])
                hidden_LE = modules[-1](first_LE[: len(read_LE)], read_LE)
        return model.lm_head(hidden_LE[-1])  # type: ignore[no-any-return]

    return model, torch.no_grad()(reference)


def _module(one: Any, norms: list[Tensor], product: Tensor) -> Reference:
    """Maps embeddings and hidden states (L, E) of pairs to the module's normed output."""
    decoder = one.get_decoder()
    of_pairs = [type(decoder.norm)(len(product), eps=one.config.rms_norm_eps) for _ in norms]
    for norm, weight in zip(of_pairs, norms, strict=True):
        norm.weight.data = weight

    def read(embedded_LE: Tensor, hidden_LE: Tensor) -> Tensor:
        both = torch.cat([of_pairs[0](embedded_LE), of_pairs[1](hidden_LE)], dim=-1)
        return decoder(inputs_embeds=(both @ product.T)[None], use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]

    return read


def _one_layer(model: Any, family: str, changes: dict[str, Any], *, seed: int) -> Any:
    """A model whose one layer has the kind of an MTP layer, with other weights than the target's layers."""
    attention = "sliding_attention" if family == UNCHAINED else "full_attention"
    kinds = {"layer_types": [attention], "mlp_layer_types": ["dense" if family in _DENSE else "sparse"]}
    kinds = {name: values for name, values in kinds.items() if hasattr(model.config, name)}
    more = {"first_k_dense_replace": 0} | ({"moe_layer_start_index": 1} if family == "ernie4_5_moe" else {})
    one: Any = tiny_model(family, **changes | {"num_hidden_layers": 1} | more | kinds)
    generator = torch.Generator().manual_seed(seed)
    for parameter in one.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    if family == "ernie4_5_moe":  # which norms with the target's
        one.get_decoder().norm.weight.data = model.get_decoder().norm.weight.detach().clone()
    return one


class WithStates:
    """A model of the library, whose hidden states end with the last one before its final norm."""

    def __init__(self, model: Any) -> None:
        self._model, self._kept = model, list[Tensor]()
        model.get_decoder().norm.register_forward_pre_hook(lambda _norm, args: self._kept.append(args[0]))

    def __call__(self, ids: Tensor, **how: Any) -> Any:
        """Read texts; see `output_hidden_states`."""
        self._kept.clear()
        found = self._model(ids, **how)
        found.hidden_states = (*found.hidden_states, self._kept[0])
        return found

"""Tiny checkpoints with an MTP layer, in the layouts of the public definitions, and what that layer computes.

Shapes: L pairs, E width, V vocabulary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.models import FAMILIES, build_checkpoint, tiny_model

# Names of the norms of token and hidden state, their product, and the last norm, by layout; then the layer's place.
_DEEPSEEK = ("{}.enorm", "{}.hnorm", "{}.eh_proj", "{}.shared_head.norm", "model.layers.2")
_MIMO = ("{}.token_layernorm", "{}.hidden_layernorm", "{}.input_proj", "{}.final_layernorm", "model.mtp_layers.0")
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
LAYOUTS = {
    "qwen2": _MIMO, "deepseek_v3": _DEEPSEEK, "glm4_moe": _DEEPSEEK, "glm4_moe_lite": _DEEPSEEK, "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN, "qwen3_5_moe_text": _QWEN,
}  # fmt: skip
_OTHERS = {"glm4_moe_lite": {name: size for name, size in FAMILIES["deepseek_v3"].items() if "dense" not in name}}
_ONE: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
Reference = Callable[[Tensor, Tensor], Tensor]


def save_with_mtp(folder: Path, family: str, **changes: Any) -> tuple[Any, Reference]:  # noqa: ANN401
    """Save a model with an MTP layer; returns it, as the library holds it, and a reference of the layer.

    The reference maps embeddings (L, E), and hidden states of the first pairs, to the logits (V,) behind the last one:
    each later pair has the output of the pair before it, so all are computed once more for each of them.
    """
    changes = _OTHERS.get(family, {}) | changes
    model: Any = build_checkpoint(folder, family, **changes)
    kinds = {name: [kind] for name, kind in _KINDS.items() if hasattr(model.config, name)}
    one: Any = tiny_model(family, **changes | _ONE | kinds)
    generator = torch.Generator().manual_seed(7)
    for parameter in one.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    one.save_pretrained(folder / "one")
    width = model.config.hidden_size
    extra = {name: 0.5 + torch.rand(width, generator=generator) for name in ("enorm", "hnorm")}
    extra["eh_proj"] = torch.randn(width, 2 * width, generator=generator) / width**0.5
    token, hidden, product, norm, place = (name.format(LAYOUTS[family][-1]) for name in LAYOUTS[family])
    swapped = extra["eh_proj"].roll(width, 1) if family == "qwen2" else extra["eh_proj"]
    stored = {f"{token}.weight": extra["enorm"], f"{hidden}.weight": extra["hnorm"], f"{product}.weight": swapped}
    for name, tensor in load_file(folder / "one" / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            stored[f"{place}.{name.removeprefix('model.layers.0.')}"] = tensor
        elif name == "model.norm.weight":
            stored[f"{norm}.weight"] = tensor
    if LAYOUTS[family] is _DEEPSEEK:  # copies, as the published files have them
        stored |= {f"{place}.shared_head.head.weight": model.lm_head.weight.detach().clone(),
                   f"{place}.embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}  # fmt: skip
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors", metadata={"format": "pt"})
    counts = {"qwen2": "num_nextn_predict_layers", "glm4_moe_lite": "num_nextn_predict_layers", "qwen3_5_text": "mtp_num_hidden_layers",
              "qwen3_5_moe_text": "mtp_num_hidden_layers"}  # fmt: skip
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {counts[family]: 1} if family in counts else {}
    if family == "qwen2":
        config |= {"model_type": "mimo", "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    one.lm_head = model.lm_head

    def reference(embedded_LE: Tensor, hidden_LE: Tensor) -> Tensor:
        decoder, layer_norm = one.get_decoder(), type(one.get_decoder().norm)
        norms = []
        for name in ("enorm", "hnorm"):
            norms.append(layer_norm(width, eps=model.config.rms_norm_eps))
            norms[-1].weight.data = extra[name]
        while True:
            number = len(hidden_LE)
            both = torch.cat([norms[0](embedded_LE[:number]), norms[1](hidden_LE)], dim=-1)
            with torch.no_grad():
                states = decoder(inputs_embeds=(both @ extra["eh_proj"].T)[None], use_cache=False).last_hidden_state[0]
                if number == len(embedded_LE):
                    return model.lm_head(states[-1])  # type: ignore[no-any-return]
            hidden_LE = torch.cat([hidden_LE, states[-1:]])

    return model, reference



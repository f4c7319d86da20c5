"""Tiny checkpoints with an MTP layer, in the layouts of the public definitions, and what that layer computes.

Shapes: L pairs, E width, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.edits import edit_config
from tests.helpers.models import FAMILIES, build_checkpoint, tiny_model

# By layout: the layer, the norms of token and hidden state, their product, and the last norm.
_DEEPSEEK = tuple(f"model.layers.2{part}" for part in ("", ".enorm", ".hnorm", ".eh_proj", ".shared_head.norm"))
_MIMO_PARTS = ("", ".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm")
_MIMO = tuple(f"model.mtp_layers.0{part}" for part in _MIMO_PARTS)
_QWEN = ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_OTHER_SIZES = {"glm4_moe_lite": {name: size for name, size in FAMILIES["deepseek_v3"].items() if "dense" not in name}}
_SAID = {"glm4_moe_lite": "num_nextn_predict_layers", "qwen3_5_text": "mtp_num_hidden_layers"}
MTP_LAYOUTS = {
    "qwen2": _MIMO, "deepseek_v3": _DEEPSEEK, "glm4_moe": _DEEPSEEK, "glm4_moe_lite": _DEEPSEEK, "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN, "qwen3_5_moe_text": _QWEN,
}  # fmt: skip
_OF_MIMO = {"model_type": "mimo", "num_nextn_predict_layers": 1, "auto_map": {"AutoConfig": "mimo.MiMoConfig"}}
Reference = Callable[[Tensor, Tensor], Tensor]


def save_with_mtp(folder: Path, family: str, **changes: Any) -> tuple[Any, Reference]:
    """Save a model with an MTP layer; returns it, as the library holds it, and a reference of the layer.

    The reference maps embeddings (L, E), and hidden states of the first pairs, to the logits (V,) behind the last one:
    each later pair has the output of the pair before it, so all are computed once more for each of them.
    """
    changes = _OTHER_SIZES.get(family, {}) | changes
    model: Any = build_checkpoint(folder, family, **changes)
    one = _one_layer(model.config, family, changes)
    one.save_pretrained(folder / "one")
    width, generator = model.config.hidden_size, torch.Generator().manual_seed(7)
    norms = [0.5 + torch.rand(width, generator=generator) for _ in range(2)]
    product = torch.randn(width, 2 * width, generator=generator) / width**0.5
    layer, *names = MTP_LAYOUTS[family]
    of_files = product.roll(width, 1) if family == "qwen2" else product
    last = one.get_decoder().norm.weight.detach().clone()
    stored = {f"{name}.weight": tensor for name, tensor in zip(names, [*norms, of_files, last], strict=True)}
    prefix = "model.layers.0."
    for name, tensor in load_file(folder / "one" / "model.safetensors").items():
        stored |= {f"{layer}.{name.removeprefix(prefix)}": tensor} if name.startswith(prefix) else {}
    if MTP_LAYOUTS[family] is _DEEPSEEK:  # copies, as the published files have them
        stored[f"{layer}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
        stored[f"{layer}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, **_OF_MIMO if family == "qwen2" else {_SAID.get(family, "mtp_num_hidden_layers"): 1})

    def reference(embedded_LE: Tensor, hidden_LE: Tensor) -> Tensor:
        decoder = one.get_decoder()
        of_pairs = [type(decoder.norm)(width, eps=model.config.rms_norm_eps) for _ in norms]
        for norm, weight in zip(of_pairs, norms, strict=True):
            norm.weight.data = weight
        while True:
            number = len(hidden_LE)
            both = torch.cat([of_pairs[0](embedded_LE[:number]), of_pairs[1](hidden_LE)], dim=-1)
            states_LE = decoder(inputs_embeds=(both @ product.T)[None], use_cache=False).last_hidden_state[0]
            if number == len(embedded_LE):
                return model.lm_head(states_LE[-1])  # type: ignore[no-any-return]
            hidden_LE = torch.cat([hidden_LE, states_LE[-1:]])

    return model, torch.no_grad()(reference)


def _one_layer(config: Any, family: str, changes: dict[str, Any]) -> Any:  # noqa: ANN401 - of transformers
    """A model whose one layer has the kind of an MTP layer, with other weights than the target's layers."""
    kinds = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    kinds = {name: values for name, values in kinds.items() if hasattr(config, name)}
    one = tiny_model(family, **changes | {"num_hidden_layers": 1, "first_k_dense_replace": 0} | kinds)
    generator = torch.Generator().manual_seed(5)
    for parameter in one.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return one

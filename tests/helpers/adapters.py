"""LoRA adapters as PEFT writes them, and the checkpoints that they stand for, merged as whole matrices."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYERS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8


def round_weights(folder: Path) -> None:
    """Round a checkpoint's weights so that sums with the adapters of this module are exact in fp32, in any order."""
    file = folder / "model.safetensors"
    save_file({name: (tensor * 64).round() / 64 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def save_adapter(folder: Path, base: Path, *, layers: Sequence[str] = LAYERS, **changes: object) -> None:
    """Save an adapter of some layers of a checkpoint; its numbers have more digits than bf16 holds.

    With `fan_in_fan_out` the checkpoint's matrices are stored as (I, O).
    """
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(7), {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.split(".")[-2] in layers and weight.dim() > 1:
            key = f"base_model.model.{name.removesuffix('.weight')}"
            num_outputs, num_inputs = reversed(weight.shape) if changes.get("fan_in_fan_out") else weight.shape
            sizes = {"A": (RANK, num_inputs), "B": (num_outputs, RANK)}
            for side, size in sizes.items():
                values = torch.randint(-300, 301, size, generator=generator) / 2048
                tensors[f"{key}.lora_{side}.weight"] = values.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": list(layers),
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))


def save_merged(folder: Path, base: Path, adapter: Path) -> None:
    """Save a checkpoint with an adapter merged into its whole matrices, in fp64 and then rounded to their format."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    tensors, pairs = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key, down in pairs.items():
        if key.endswith(".lora_A.weight"):
            up = pairs[key.replace("lora_A", "lora_B")]
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            added = up.double() @ down.double()
            added = added.t() if config["fan_in_fan_out"] else added
            tensors[name] = (tensors[name].double() + scale * added).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

"""Writes checkpoints with int4 weights as quantizing tools do, and the checkpoints of numbers that they stand for.

The packing is written from the layouts' definitions, and shares nothing with the code under test.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
LAYOUTS = ("compressed-tensors", "compressed-tensors, asymmetric", "gptq", "gptq, asymmetric", "gptq_v2")
_LINEAR = re.compile(r"layers\.\d+\..*(proj|query_key_value|dense\w*)\.weight$")


def pack_checkpoint(origin: Path, packed: Path, dequantized: Path, layout: str) -> None:
    """Quantize the linear layers of a checkpoint in one file.

    Args:
        origin: folder of the checkpoint.
        packed: folder to write, with int4 weights.
        dequantized: folder to write, with the same weights in fp32.
        layout: one of LAYOUTS.
    """
    packed_tensors: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(origin / "model.safetensors").items():
        if not _LINEAR.search(name):
            packed_tensors[name] = numbers[name] = tensor
            continue
        codes, scales, zeros = _quantized(
            tensor.float(), is_symmetric="asymmetric" not in layout and layout != "gptq_v2"
        )
        numbers[name] = _dequantized(codes, scales, zeros)
        module = name.removesuffix(".weight")
        packed_tensors |= {f"{module}.{leaf}": part for leaf, part in _parts(codes, scales, zeros, layout).items()}
    for folder, tensors in ((packed, packed_tensors), (dequantized, numbers)):
        shutil.copytree(origin, folder)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    edit_config(packed, quantization_config=quantization_config(layout))


def edit_config(folder: Path, **changes: object) -> None:
    """Change fields of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def quantization_config(layout: str) -> dict[str, Any]:
    """What config.json says of a layout."""
    if layout.startswith("gptq"):
        version = layout.partition(",")[0]
        return {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": layout == "gptq",
            "checkpoint_format": version, "damp_percent": 0.01, "true_sequential": True,
        }  # fmt: skip
    weights = {
        "num_bits": 4, "type": "int", "symmetric": "asymmetric" not in layout, "strategy": "group",
        "group_size": GROUP, "actorder": None, "dynamic": False,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def _quantized(weight_OI: Tensor, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (O, I), scales in fp16 (O, G) and zeros (O, G)."""
    groups = weight_OI.unflatten(1, (-1, GROUP))
    least, most = groups.amin(2), groups.amax(2)
    if is_symmetric:
        scales = (2 * torch.maximum(-least, most) / 15).half()
        zeros = torch.full_like(scales, 8).int()
    else:
        scales = ((most - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(1, 15).int()
    codes = ((groups / scales.float()[..., None]).round().int() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(1), scales, zeros


def _dequantized(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups: Tensor = codes.unflatten(1, (-1, GROUP)) - zeros[..., None]
    return (groups * scales.float()[..., None]).flatten(1)


def _parts(codes: Tensor, scales: Tensor, zeros: Tensor, layout: str) -> dict[str, Tensor]:
    num_outputs, num_inputs = codes.shape
    if layout.startswith("gptq"):
        first = 0 if layout == "gptq_v2" else 1
        return {
            "qweight": _words(codes).t(), "scales": scales.t(), "qzeros": _words(zeros.t() - first),
            "g_idx": torch.arange(num_inputs, dtype=torch.int32) // GROUP,
        }  # fmt: skip
    parts = {
        "weight_packed": _words(codes), "weight_scale": scales, "weight_shape": torch.tensor([num_outputs, num_inputs])
    }  # fmt: skip
    return parts if "asymmetric" not in layout else parts | {"weight_zero_point": _words(zeros.t()).t()}


def _words(codes: Tensor) -> Tensor:
    """Join eight columns to an int32, the first in its lowest bits."""
    words = (codes.long().unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

"""Writes checkpoints with quantized weights as tools do, and the checkpoints of numbers that they stand for.

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

from tests.helpers.edits import edit_config

_GROUPS = {
    "compressed-tensors": 128,
    "compressed-tensors, asymmetric": 64,
    "compressed-tensors, whole rows": -1,
    "gptq": 128,
    "gptq, asymmetric": 32,
    "gptq_v2": 96,
    "awq": 128,
    "awq, small": 64,
    "gptq, sorted": 128,
    "compressed-tensors, sorted": 64,
    "auto-round": 128,
}
"""Layouts of int4, with the inputs that share a scale."""
_BLOCKS: dict[str, tuple[int | None, int | None]] = {
    "int8": (1, None),
    "int8, packed": (1, None),
    "int8, one scale": (None, None),
    "fp8": (128, 128),
    "fp8, one scale": (None, None),
    "fbgemm_fp8": (1, None),
    "float": (1, None),
    "float, blocks": (128, 128),
    "float, one scale": (None, None),
    "int8 of bitsandbytes": (1, None),
}
"""Layouts of bytes, with the outputs and inputs that share a scale, None for all."""
_GPTQ_BYTES = {"gptq, bytes": 128, "gptq, bytes of rows": -1, "gptq_v2, bytes": 64}
"""Layouts of GPTQ in 8 bits, with the inputs that share a scale."""
_AUTO_ROUND = "auto-round"
_FLOATS = ("nf4", "nf4, twice", "fp4, twice")
_BNB_INT8 = "int8 of bitsandbytes"
_FP4 = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16, "nvfp4 of modelopt": 16}
"""Layouts of floats of 4 bits, with the inputs that share a scale."""
LAYOUTS = (*_GROUPS, *_BLOCKS, *_GPTQ_BYTES, *_FLOATS, *_FP4)
FP4 = torch.tensor([sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3)])
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
_LINEAR = re.compile(r"(layers|mtp_block)\.\d+\..*(proj(_with_mqa)?|query_key_value|dense\w*)\.weight$")
MXFP4 = "mxfp4"
"""A layout of experts alone."""
_OF_EXPERTS = re.compile(r"experts\.\w+_proj$")
E2M1 = torch.tensor([sign * number for sign in (1, -1) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])


def pack_checkpoint(origin: Path, packed: Path, dequantized: Path, layout: str) -> None:
    """Quantize the linear layers of a checkpoint in one file.

    Args:
        origin: folder of the checkpoint.
        packed: folder to write, with quantized weights.
        dequantized: folder to write, with the same weights in fp32.
        layout: one of LAYOUTS, or MXFP4.
    """
    packed_tensors: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(origin / "model.safetensors").items():
        if layout == MXFP4 and _OF_EXPERTS.search(name):
            numbers_XOI, parts = _in_fp4(tensor.float().transpose(1, 2), "mxfp4-pack-quantized")
            numbers[name], scales = numbers_XOI.transpose(1, 2), parts["weight_scale"]
            blocks = parts["weight_packed"].unflatten(2, (-1, 16))
            packed_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            continue
        if layout == MXFP4 or not _LINEAR.search(name):
            packed_tensors[name] = numbers[name] = tensor
            continue
        makers: dict[Any, Any] = {
            _in_bytes: _BLOCKS,
            _in_bytes_of_gptq: _GPTQ_BYTES,
            _in_floats: _FLOATS,
            _in_fp4: _FP4,
            _in_4_bits: _GROUPS,
        }
        make = next(make for make, layouts in makers.items() if layout in layouts)
        numbers[name], parts = make(tensor.float(), layout)
        module = name.removesuffix(".weight")
        packed_tensors |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
    for folder, tensors in ((packed, packed_tensors), (dequantized, numbers)):
        shutil.copytree(origin, folder)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    edit_config(packed, quantization_config=quantization_config(layout))


def quantization_config(layout: str) -> dict[str, Any]:
    if layout in _BLOCKS:
        return _config_of_bytes(layout)
    if layout in _FLOATS:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "_load_in_4bit": True,
            "bnb_4bit_quant_type": layout[:3],
            "bnb_4bit_use_double_quant": layout != "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": None,
        }
    if layout == MXFP4 or layout in _FP4:
        return _config_of_fp4(layout)
    size = (_GROUPS | _GPTQ_BYTES)[layout]
    if layout.startswith(("awq", "gptq", _AUTO_ROUND)):
        return _config_in_groups(layout, size)
    return _compressed(
        "pack-quantized",
        num_bits=4,
        type="int",
        symmetric=not layout.endswith(("asymmetric", "sorted")),
        strategy="group" if size > 0 else "channel",
        group_size=size if size > 0 else None,
        actorder="group" if "sorted" in layout else None,
    )


def _config_in_groups(layout: str, size: int) -> dict[str, Any]:
    described: dict[str, Any] = {"bits": 8 if "bytes" in layout else 4, "group_size": size}
    if layout == _AUTO_ROUND:
        return described | {
            "quant_method": layout,
            "packing_format": "auto_round:auto_gptq",
            "sym": True,
            "data_type": "int",
            "autoround_version": "0.5.1",
            "block_name_to_quantize": "model.layers",
            "extra_config": {},
        }
    if layout.startswith("awq"):
        return described | {
            "quant_method": "awq",
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    return described | {
        "quant_method": "gptq",
        "desc_act": "sorted" in layout,
        "sym": layout == "gptq" or "bytes" in layout,
        "checkpoint_format": layout.partition(",")[0],
        "damp_percent": 0.01,
        "true_sequential": True,
    }


WEIGHTS = ("config_groups", "group_0", "weights")
"""Where compressed-tensors describes the weights."""


def changed(layout: str, *path: str, **changes: object) -> dict[str, Any]:
    """The same with other fields, of the part at a path."""
    config = quantization_config(layout)
    inner = config
    for name in path:
        inner = inner[name]
    inner.update(changes)
    return config


def _config_of_bytes(layout: str) -> dict[str, Any]:
    kind, _, scales = layout.partition(", ")
    if layout == _BNB_INT8:
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "_load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": None,
            "bnb_4bit_quant_type": "fp4",
        }
    if kind == "fbgemm_fp8":
        return {"quant_method": kind, "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    if kind == "fp8":
        block = None if scales else [128, 128]
        return {"quant_method": kind, "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
    form = "pack-quantized" if scales == "packed" else "int-quantized" if kind == "int8" else "float-quantized"
    return _compressed(
        form,
        activations={"num_bits": 8, "dynamic": True},
        num_bits=8,
        type="int" if kind == "int8" else "float",
        symmetric=True,
        block_structure=[128, 128],
        strategy={"one scale": "tensor", "blocks": "block"}.get(scales, "channel"),
    )


def _config_of_fp4(layout: str) -> dict[str, Any]:
    if layout == MXFP4:
        return {"quant_method": layout, "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    if layout == "nvfp4 of modelopt":
        four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"weights": four_bits, "input_activations": four_bits, "targets": ["Linear"]}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.33.0"},
        }
    strategy = "tensor_group" if layout.startswith("nvfp4") else "group"
    return _compressed(layout, num_bits=4, type="float", symmetric=True, strategy=strategy, group_size=_FP4[layout])


def _compressed(form: str, *, activations: object = None, **weights: object) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"actorder": None, "dynamic": False} | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _in_fp4(weight: Tensor, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The numbers (..., O, I) and the stored parts of a weight of floats of 4 bits."""
    groups = weight.unflatten(-1, (-1, _FP4[layout]))
    largest, factor = groups.abs().amax(-1).clamp(min=2.0**-100), torch.tensor(1.0)
    if layout.startswith("mxfp4"):
        exponents = largest.log2().floor() - 2
        stored, scales = (exponents + 127).to(torch.uint8), exponents.exp2()
    else:
        factor = largest.max() / (6 * 448)
        stored = (largest / 6 / factor).to(torch.float8_e4m3fn)
        scales = stored.float()
    places = ((groups / (scales * factor)[..., None]).abs()[..., None] - E2M1[:8]).abs().argmin(-1)
    codes = (places + 8 * (groups < 0)).to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    parts = {"weight_packed": codes[..., 0] | codes[..., 1] << 4, "weight_scale": stored}
    match layout:
        case "nvfp4-pack-quantized":
            parts |= {"weight_global_scale": (1 / factor).view(1), "input_global_scale": torch.tensor([9.0])}
            factor = 1 / (1 / factor)
        case "nvfp4 of modelopt":
            parts |= {"weight": parts.pop("weight_packed"), "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
    return (E2M1[places] * groups.sign() * scales[..., None] * factor).flatten(-2), parts


def _in_bytes(weight_OI: Tensor, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The numbers (O, I) and the stored parts of a weight with a byte each, scaled block by block."""
    most = 127 if layout.startswith("int8") else 448
    height, width = (size or whole for size, whole in zip(_BLOCKS[layout], weight_OI.shape, strict=True))
    values, numbers = torch.zeros_like(weight_OI), torch.zeros_like(weight_OI)
    scales = torch.zeros(-(-weight_OI.shape[0] // height), -(-weight_OI.shape[1] // width))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scales[row, column] = scale = (weight_OI[block].abs().max() / most).bfloat16().float()
            scaled = (weight_OI[block] / scale).clamp(-most, most)
            values[block] = scaled.round() if most == 127 else scaled.to(torch.float8_e4m3fn).float()
            numbers[block] = values[block] * scale
    stored = {"weight": values.to(torch.int8 if most == 127 else torch.float8_e4m3fn)}
    match layout:
        case "int8, packed":
            words = (values.long() + 128).unflatten(1, (-1, 4)) << 8 * torch.arange(4)
            stored = {"weight_packed": _int32(words.sum(2)), "weight_scale": scales.bfloat16()}
            stored["weight_shape"] = torch.tensor(weight_OI.shape)
        case "fp8":
            stored["weight_scale_inv"] = scales
        case "fp8, one scale":  # AutoFP8 calls it otherwise
            stored |= {"weight_scale": scales.view(()), "input_scale": torch.tensor(0.5)}
        case "int8 of bitsandbytes":
            stored |= {"SCB": scales.flatten() * 127, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        case "fbgemm_fp8":
            stored |= {"weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
        case "int8, one scale" | "float, one scale":
            stored |= {"weight_scale": scales.bfloat16().view(1), "input_scale": torch.tensor(0.5)}
        case _:
            stored["weight_scale"] = scales.bfloat16()
    return numbers, stored


def _in_bytes_of_gptq(weight_OI: Tensor, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The numbers (O, I) and the stored parts of a weight, whose zeros are all 128."""
    size = _GPTQ_BYTES[layout] if _GPTQ_BYTES[layout] > 0 else weight_OI.shape[1]
    groups = weight_OI.unflatten(1, (-1, size))
    scales = (groups.abs().amax(2) / 127).half()
    steps = (groups / scales.float()[..., None]).round().clamp(-128, 127)

    def words(bytes_NM: Tensor) -> Tensor:
        return _int32((bytes_NM.long().unflatten(1, (-1, 4)) << 8 * torch.arange(4)).sum(2))

    zeros = torch.full((scales.shape[1], len(weight_OI)), 128 if layout.startswith("gptq_v2") else 127)
    parts = {
        "qweight": words(steps.flatten(1) + 128).t(),
        "scales": scales.t(),
        "qzeros": words(zeros),
        "g_idx": torch.arange(weight_OI.shape[1], dtype=torch.int32) // size,
    }
    return (steps * scales.float()[..., None]).flatten(1), parts


def _in_floats(weight_OI: Tensor, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The numbers (O, I) and the stored parts of a weight, also with scales that are quantized themselves."""
    blocks = weight_OI.view(-1, 64)
    scales = blocks.abs().amax(1)
    kind = layout[:3]
    table = {"nf4": NF4, "fp4": FP4}[kind]
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight_OI.shape)}
    stored = {"weight.absmax": scales, "weight.quant_map": table.clone()}
    if "twice" in layout:
        offset, numbers = float(scales.mean()), torch.linspace(-1, 1, 256)
        outer = torch.stack([part.sub(offset).abs().max() for part in scales.split(256)])
        spread = outer.repeat_interleave(256)[: len(scales)]
        bytes_ = (((scales - offset) / spread)[:, None] - numbers).abs().argmin(1)
        scales = numbers[bytes_] * spread + offset
        stored |= {"weight.absmax": bytes_.to(torch.uint8), "weight.nested_absmax": outer}
        stored["weight.nested_quant_map"] = numbers
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = ((blocks / scales[:, None])[..., None] - table).abs().argmin(2)
    stored["weight"] = (codes.view(-1, 2)[:, :1] << 4 | codes.view(-1, 2)[:, 1:]).to(torch.uint8)
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return (table[codes] * scales[:, None]).view_as(weight_OI), stored


def _in_4_bits(weight_OI: Tensor, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The numbers (O, I) and the stored parts of a weight."""
    size = _GROUPS[layout] if _GROUPS[layout] > 0 else weight_OI.shape[1]
    is_symmetric = layout in {"gptq", _AUTO_ROUND, "compressed-tensors", "compressed-tensors, whole rows"}
    order = torch.arange(weight_OI.shape[1])
    if "sorted" in layout:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(len(order)))
    back = order.argsort()
    groups = weight_OI[:, order].unflatten(1, (-1, size))
    least, most = groups.amin(2), groups.amax(2)
    if is_symmetric:
        scales = (2 * torch.maximum(-least, most) / 15).half()
        zeros = torch.full_like(scales, 8).int()
    else:
        scales = ((most - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(1, 15).int()
    codes = ((groups / scales.float()[..., None]).round().int() + zeros[..., None]).clamp(0, 15)
    numbers = ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1)
    group_of = torch.arange(len(order), dtype=torch.int32) // size
    return numbers[:, back], _parts(codes.flatten(1)[:, back], scales, zeros, group_of[back], layout)


def _parts(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, layout: str) -> dict[str, Tensor]:
    num_outputs, num_inputs = codes.shape
    if layout.startswith("awq"):
        return {"qweight": _awq_words(codes.t()), "scales": scales.t(), "qzeros": _awq_words(zeros.t())}
    if layout.startswith(("gptq", _AUTO_ROUND)):
        first = 0 if layout == "gptq_v2" else 1
        return {
            "qweight": _words(codes).t(),
            "scales": scales.t(),
            "qzeros": _words(zeros.t() - first),
            "g_idx": groups,
        }
    parts = {
        "weight_packed": _words(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }
    if "sorted" in layout:
        parts["weight_g_idx"] = groups
    symmetric = "compressed-tensors", "compressed-tensors, whole rows"
    return parts if layout in symmetric else parts | {"weight_zero_point": _words(zeros.t()).t()}


def _awq_words(codes: Tensor) -> Tensor:
    """Join eight columns as AutoAWQ does: 0 and 1 at the bits 0 and 16, 2 and 3 at 4 and 20, and so on."""
    columns = codes.unflatten(1, (-1, 8))
    return _words(torch.cat([columns[..., 0::2], columns[..., 1::2]], dim=2).flatten(1))


def _words(codes: Tensor) -> Tensor:
    """Join eight columns to an int32, the first in its lowest bits."""
    return _int32((codes.long().unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(2))


def _int32(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

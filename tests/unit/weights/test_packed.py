"""Quantized checkpoints of all layouts: the numbers they stand for, whole and in slices, and what is refused."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.weights import byte_rows, int4_rows
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.lanes import grid
from tests.helpers.models import build_checkpoint
from tests.helpers.packed_checkpoints import LAYOUTS, NF4, edit_config, pack_checkpoint, quantization_config

pytestmark = pytest.mark.seconds

NAME = "model.layers.1.self_attn.k_proj.weight"
Made = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint in a layout, and the numbers that it stands for; read only."""
    origin = tmp_path_factory.mktemp("origin")
    build_checkpoint(
        origin, "llama", hidden_size=384, intermediate_size=768, num_key_value_heads=2, attention_bias=True
    )

    @cache
    def make(layout: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("packed")
        pack_checkpoint(origin, folder / "packed", folder / "numbers", layout)
        return folder / "packed", folder / "numbers"

    return make


def numbers(rows: Tensor, storage: str | None) -> Tensor:
    """The weights (O, I) that rows of bytes stand for."""
    values, words = byte_rows.split(rows)
    groups, scales = values.unflatten(1, (words.shape[1], -1)), words.view(torch.float32)[..., None]
    match storage:
        case "int8_weight_only":
            weights = groups.view(torch.int8) * scales
        case "nf4":
            weights = NF4[torch.stack([groups >> 4, groups & 15], dim=3).flatten(2).long()] * scales
        case "fp8_weight_only":
            weights = groups.view(torch.float8_e4m3fn).float() * scales
        case _:
            codes = torch.cat(int4_rows.unpack_codes(groups), dim=2)
            weights = (codes - int4_rows.zeros_of(words)[..., None]) * int4_rows.scales_of(words)[..., None]
    found: Tensor = weights.flatten(1)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_is_the_number_that_its_layout_defines(made: Made, layout: str) -> None:
    packed, plain = (inspect(folder) for folder in made(layout))
    assert packed.tensors.keys() >= plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        read = packed.read(name)
        if storage := packed.tensors[name].storage:
            assert packed.tensors[name].shape == tensor.shape
            assert read.dtype is torch.uint8
            read = numbers(read, storage)
        assert torch.equal(read, plain.read(name)), name
    assert sum(tensor.storage is not None for tensor in packed.tensors.values()) == 14


@grid(
    layout=LAYOUTS,
    cut=[
        (0, [range(5, 23)]),
        (0, [range(90, 96), range(8)]),
        (1, [range(128, 256)]),
    ],
)
def test_a_slice_is_that_of_the_whole(made: Made, layout: str, cut: tuple[int, list[range]]) -> None:
    """Also where zeros of eight outputs are in one integer, and the slice begins between them."""
    packed, plain = (inspect(folder) for folder in made(layout))
    dim, parts = cut
    found = packed.read(NAME, dim=dim, parts=parts, dtype=torch.float16)
    assert torch.equal(numbers(found, packed.tensors[NAME].storage), plain.read(NAME, dim=dim, parts=parts))


def changed(layout: str, *path: str, **changes: object) -> dict[str, Any]:
    config = quantization_config(layout)
    inner = config
    for name in path:
        inner = inner[name]
    inner.update(changes)
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
REFUSED = {
    "another method": ({"quant_method": "hqq", "bits": 4}, 'quant_method "hqq"'),
    "awq's other kernels": (changed("awq", version="gemv"), r'\(version "gemv"\)'),
    "awq without zeros": (changed("awq", zero_point=False), r"\(zero_point false\)"),
    "a list": ([4], "quant_method null"),
    "8 bits": (changed("gptq", bits=8), r"\(bits 8\)"),
    "small groups": (changed("gptq", group_size=16), r"\(group_size 16\)"),
    "odd groups": (changed("awq", group_size=200), r"\(group_size 200\)"),
    "no size": (changed("awq", group_size=None), r"\(group_size null\)"),
    "rules of its own": (changed("gptq", dynamic={"-:.*": {}}), r"\(dynamic {"),
    "sorted inputs": (changed("gptq", desc_act=True), r"\(desc_act true\)"),
    "marlin": (changed("gptq", checkpoint_format="marlin"), r'\(checkpoint_format "marlin"\)'),
    "another format": (changed("compressed-tensors", format="marlin-24"), r'\(format "marlin-24"\)'),
    "a format of other bits": (changed("compressed-tensors", format="int-quantized"), r"\(num_bits 4; strategy"),
    "no groups": (changed("compressed-tensors", config_groups={}), r"\(no config_groups\)"),
    "per matrix": (changed("compressed-tensors", *WEIGHTS, strategy="tensor"), r'\(strategy "tensor"'),
    "sparse": (changed("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}), r"\(sparse weights\)"),
    "two formats": (
        changed("compressed-tensors", "config_groups", group_1={"weights": {"num_bits": 8}}),
        r"\(several config_groups\)",
    ),
    "floats": (changed("compressed-tensors", *WEIGHTS, type="float"), r'\(type "float"\)'),
    "bytes with zeros": (changed("int8", *WEIGHTS, symmetric=False), r"\(symmetric false\)"),
    "fp4": (changed("nf4", bnb_4bit_quant_type="fp4"), r'\(bnb_4bit_quant_type "fp4"\)'),
    "bytes of bitsandbytes": (changed("nf4", load_in_4bit=False), r"\(load_in_4bit false\)"),
    "wide words": (changed("nf4", bnb_4bit_quant_storage="bfloat16"), r'\(bnb_4bit_quant_storage "bfloat16"\)'),
    "wide blocks": (changed("float, blocks", *WEIGHTS, block_structure=[128, 192]), r"\(blocks of 192 inputs\)"),
    "no blocks": (changed("fp8", weight_block_size=[128]), r"\(blocks of null inputs\)"),
    "groups of bytes": (changed("int8", *WEIGHTS, strategy="group", group_size=128), r'\(strategy "group"\)'),
    "group order": (changed("compressed-tensors", *WEIGHTS, actorder="group"), r'\(actorder "group"\)'),
    "its other name": (changed("compressed-tensors", *WEIGHTS, actorder="dynamic"), r'\(actorder "dynamic"\)'),
    "an order that is no name": (changed("compressed-tensors", *WEIGHTS, actorder={}), r"\(actorder {}\)"),
    "a version that is no name": (changed("gptq", checkpoint_format=["gptq"]), r'\(checkpoint_format \["gptq"\]\)'),
    "rotations": (changed("compressed-tensors", transform_config={"config_groups": {}}), r"\(transform_config {"),
}


@pytest.mark.parametrize(("described", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_forms_are_refused_with_what_is_different(
    made: Made, tmp_path: Path, described: object, reason: str
) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(made("gptq")[0], folder)
    edit_config(folder, quantization_config=described)
    with pytest.raises(CheckpointError, match=rf"quantized weights that cannot be read .*{reason}.*groups of 32"):
        inspect(folder)


PARTS = [
    *(("compressed-tensors, asymmetric", leaf) for leaf in ("weight_packed", "weight_scale", "weight_zero_point")),
    *(("gptq", leaf) for leaf in ("qweight", "scales", "qzeros", "g_idx")), ("awq", "qzeros"),
    ("int8", "weight_scale"), ("int8", "weight"), ("float", "weight_scale"), ("fp8", "weight_scale_inv"),
    ("nf4", "weight"), ("nf4", "weight.absmax"), ("nf4, twice", "weight.nested_absmax"),
    ("nf4, twice", "weight.nested_quant_map"), ("nf4", "weight.quant_state.bitsandbytes__nf4"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "leaf"), PARTS)
def test_parts_that_do_not_fit_each_other_are_refused(made: Made, tmp_path: Path, layout: str, leaf: str) -> None:
    def shorten(tensors: dict[str, Tensor]) -> None:
        name = f"{NAME.removesuffix('weight')}{leaf}"
        tensors[name] = tensors[name][1:].clone()

    folder = edited(made(layout)[0], tmp_path, shorten)
    with pytest.raises(CheckpointError, match=r"no (\w+_weight_only.*|nf4) weight for model.layers.1.*k_proj"):
        inspect(folder)


@pytest.mark.parametrize(("layout", "leaf"), [("int8", "weight"), ("gptq", "qweight"), ("gptq", "qzeros")])
def test_parts_of_another_kind_are_refused(made: Made, tmp_path: Path, layout: str, leaf: str) -> None:
    def convert(tensors: dict[str, Tensor]) -> None:
        name = f"{NAME.removesuffix('weight')}{leaf}"
        tensors[name] = tensors[name].to(torch.int16)

    with pytest.raises(CheckpointError, match=r"no int\d_weight_only weight for model.layers.1.*k_proj"):
        inspect(edited(made(layout)[0], tmp_path, convert))


@pytest.mark.parametrize(("layout", "leaf"), [("gptq", "g_idx"), ("compressed-tensors", "weight_g_idx")])
def test_scattered_groups_are_refused_even_if_the_config_says_otherwise(
    made: Made, tmp_path: Path, layout: str, leaf: str
) -> None:
    def scatter(tensors: dict[str, Tensor]) -> None:
        tensors[NAME.replace("weight", leaf)] = torch.arange(384, dtype=torch.int32).flip(0) // 128

    checkpoint = inspect(edited(made(layout)[0], tmp_path, scatter))
    with pytest.raises(CheckpointError, match=rf"k_proj\.{leaf}, and consecutive inputs must share a scale"):
        checkpoint.read(NAME)


@pytest.mark.parametrize("order", [None, False, "weight", "static"])
def test_an_order_that_leaves_groups_in_place_is_read(made: Made, tmp_path: Path, order: object) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(made("compressed-tensors")[0], folder)
    described = changed("compressed-tensors", *WEIGHTS, actorder=order) | {"transform_config": {}}
    edit_config(folder, quantization_config=described)
    assert inspect(folder).tensors[NAME].storage == "int4_weight_only"


def edited(origin: Path, tmp_path: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    folder = tmp_path / "packed"
    shutil.copytree(origin, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder

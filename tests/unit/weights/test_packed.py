"""Quantized checkpoints of all layouts: the numbers they stand for, whole and in slices, and what is refused."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.weights import byte_rows
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.edits import edit_config
from tests.helpers.lanes import first, pairs
from tests.helpers.models import build_checkpoint
from tests.helpers.packed_checkpoints import E2M1, FP4, LAYOUTS, NF4, WEIGHTS, changed, pack_checkpoint

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
    if storage == "int4_weight_only":
        values, words, order = byte_rows.split_int4(rows)
    else:
        (values, words), order = byte_rows.split(rows), None
    if storage in ("mxfp4", "nvfp4"):
        codes, scales, factors = byte_rows.split_fp4(rows)
        scales = 2.0 ** (scales.float() - 127) if storage == "mxfp4" else scales.view(torch.float8_e4m3fn).float()
        codes_OGH = codes.unflatten(1, (-1, 16))
        values = E2M1[torch.cat([codes_OGH & 15, codes_OGH >> 4], dim=2).flatten(1).long()]
        numbers_OI: Tensor = (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)
        return numbers_OI * factors[:, None]
    groups, scales = values.unflatten(1, (words.shape[1], -1)), words.view(torch.float32)[..., None]
    match storage:
        case "int8_weight_only" | "int8_groups":
            weights = groups.view(torch.int8) * scales
        case "nf4" | "fp4":
            table = {"nf4": NF4, "fp4": FP4}[storage]
            weights = table[torch.stack([groups >> 4, groups & 15], dim=3).flatten(2).long()] * scales
        case "fp8_weight_only":
            weights = groups.view(torch.float8_e4m3fn).float() * scales
        case _:
            codes = torch.cat(byte_rows.unpack_codes(groups), dim=2)
            weights = (codes - byte_rows.zeros_of(words)[..., None]) * byte_rows.scales_of(words)[..., None]
    found: Tensor = weights.flatten(1)
    if order is None:
        return found
    (order_I,) = order.unique(dim=0)
    is_input = order_I < byte_rows.GAP
    return found[:, is_input][:, order_I[is_input].argsort()]


@pytest.mark.parametrize("layout", first(LAYOUTS, num=6))
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


@pairs(layout=LAYOUTS, cut=[(0, [range(5, 23)]), (0, [range(90, 96), range(8)]), (1, [range(128, 256)])])
def test_a_slice_is_that_of_the_whole(made: Made, layout: str, cut: tuple[int, list[range]]) -> None:
    """Also where zeros of eight outputs are in one integer, and the slice begins between them."""
    packed, plain = (inspect(folder) for folder in made(layout))
    dim, parts = cut
    found = packed.read(NAME, dim=dim, parts=parts, dtype=torch.float16)
    assert torch.equal(numbers(found, packed.tensors[NAME].storage), plain.read(NAME, dim=dim, parts=parts))


@pytest.mark.parametrize(("layout", "num_groups"), [("gptq, sorted", 6), ("compressed-tensors, sorted", 12)])
def test_parts_of_scattered_inputs_are_of_one_size_however_they_are_cut(
    made: Made, layout: str, num_groups: int
) -> None:
    """Also with no input of a group; experts of a layer are stacked."""
    packed, plain = (inspect(folder) for folder in made(layout))
    name = "model.layers.1.mlp.down_proj.weight"
    for part in (range(8), range(8, 400), range(392, 768)):
        rows = packed.read(name, dim=1, parts=[part])
        assert torch.equal(numbers(rows, "int4_weight_only"), plain.read(name, dim=1, parts=[part]))
        assert len(rows[0]) == len(part) // 32 + num_groups


def test_a_description_that_runs_do_not_read_is_refused_before_the_files_are_looked_at(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, quantization_config=changed("gptq", bits=3))
    sentence = r"config.json describes quantized weights that cannot be read \(bits 3\): .*groups of 32"
    with pytest.raises(CheckpointError, match=sentence):
        inspect(tmp_path)


PARTS = [
    *(("compressed-tensors, asymmetric", leaf) for leaf in ("weight_packed", "weight_scale", "weight_zero_point")),
    *(("gptq", leaf) for leaf in ("qweight", "scales", "qzeros", "g_idx")), ("awq", "qzeros"),
    ("gptq, sorted", "g_idx"), ("gptq, bytes", "qweight"), ("gptq, bytes", "qzeros"), ("gptq, bytes", "scales"),
    ("int8", "weight_scale"), ("int8", "weight"), ("float", "weight_scale"), ("fp8", "weight_scale_inv"),
    ("nf4", "weight"), ("nf4", "weight.absmax"), ("nf4, twice", "weight.nested_absmax"),
    ("nf4, twice", "weight.nested_quant_map"), ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ("fp4, twice", "weight.absmax"), ("int8 of bitsandbytes", "SCB"), ("mxfp4-pack-quantized", "weight_packed"),
    ("nvfp4-pack-quantized", "weight_scale"), ("nvfp4-pack-quantized", "weight_global_scale"),
]  # fmt: skip


OF_ANOTHER_KIND = ("int8", "weight"), ("gptq", "qweight"), ("gptq", "qzeros")


@pytest.mark.parametrize(("layout", "leaf", "is_short"), [
    *((*part, True) for part in PARTS), *((*part, False) for part in OF_ANOTHER_KIND),
])  # fmt: skip
def test_parts_that_do_not_fit_each_other_are_refused(
    made: Made, tmp_path: Path, layout: str, leaf: str, *, is_short: bool
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{NAME.removesuffix('weight')}{leaf}"
        tensors[name] = tensors[name][1:].clone() if is_short else tensors[name].to(torch.int16)

    folder = edited(made(layout)[0], tmp_path, change)
    with pytest.raises(
        CheckpointError, match=r"no (int\d_\w+|fp8_\w+|nf4|fp4|mxfp4|nvfp4) weight for model.layers.1.*k_proj"
    ):
        inspect(folder)


def test_bytes_of_bitsandbytes_in_the_order_of_old_gpus_are_refused(made: Made, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{NAME}_format"].fill_(2)

    with pytest.raises(CheckpointError, match=r"no int8_weight_only weight for model.layers.1.*k_proj"):
        inspect(edited(made("int8 of bitsandbytes")[0], tmp_path, change))


@pytest.mark.parametrize(("layout", "leaf"), [("gptq", "g_idx"), ("compressed-tensors", "weight_g_idx")])
def test_scattered_groups_are_refused_even_if_the_config_says_otherwise(
    made: Made, tmp_path: Path, layout: str, leaf: str
) -> None:
    def scatter(tensors: dict[str, Tensor]) -> None:
        tensors[NAME.replace("weight", leaf)] = torch.arange(384, dtype=torch.int32).flip(0) // 128

    checkpoint = inspect(edited(made(layout)[0], tmp_path, scatter))
    with pytest.raises(CheckpointError, match=rf"k_proj\.{leaf}, and its config.json does not say so"):
        checkpoint.read(NAME)


def test_bytes_with_other_zeros_than_the_config_says_are_refused(made: Made, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[NAME.replace("weight", "qzeros")][1] += 1

    checkpoint = inspect(edited(made("gptq, bytes")[0], tmp_path, change))
    with pytest.raises(CheckpointError, match=r"other zeros than the middle in .*k_proj.qzeros, and its config.json"):
        checkpoint.read(NAME)


@pytest.mark.parametrize("order", [None, False, "weight", "static"])
def test_an_order_that_leaves_groups_in_place_is_read(made: Made, tmp_path: Path, order: object) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(made("compressed-tensors")[0], folder)
    described = changed("compressed-tensors", *WEIGHTS, actorder=order) | {"transform_config": {}}
    edit_config(folder, quantization_config=described)
    assert inspect(folder).tensors[NAME].storage == "int4_weight_only"


def test_an_order_of_other_groups_is_refused(made: Made, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[NAME.replace("weight", "g_idx")][130] = 3

    checkpoint = inspect(edited(made("gptq, sorted")[0], tmp_path, change))
    sentence = r"k_proj.g_idx of other groups than 3 of 128 inputs: copy"
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.read(NAME)
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.read(NAME, dim=1, parts=[range(128, 256)])


def edited(origin: Path, tmp_path: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    folder = tmp_path / "packed"
    shutil.copytree(origin, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder

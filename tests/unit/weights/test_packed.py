"""Quantized checkpoints of all layouts: the numbers they stand for, whole and in slices, and what is refused."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.edits import Edit, edit_config, edit_tensors
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.lanes import first, pairs
from tests.helpers.models import build_checkpoint
from tests.helpers.packed_checkpoints import LAYOUTS, WEIGHTS, changed, pack_checkpoint

pytestmark = [pytest.mark.seconds, of_all_formats]

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


def numbers(rows: Tensor, storage: str, num_inputs: int) -> Tensor:
    """The weights (O, I) that rows of bytes stand for: what their kernel maps unit vectors to."""
    kernel = Precision(quantization=storage).kernel
    assert kernel
    assert rows.dtype is torch.uint8
    return kernel(rows, None)(torch.eye(num_inputs)).t()


@pytest.mark.parametrize("layout", first(LAYOUTS, num=6))
def test_every_weight_is_the_number_that_its_layout_defines(made: Made, layout: str) -> None:
    packed, plain = (inspect(folder) for folder in made(layout))
    assert packed.tensors.keys() >= plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        read = packed.read(name)
        if storage := packed.tensors[name].storage:
            assert packed.tensors[name].shape == tensor.shape
            read = numbers(read, storage, tensor.shape[1])
        assert torch.equal(read, plain.read(name)), name
    assert sum(tensor.storage is not None for tensor in packed.tensors.values()) == 14


@pairs(layout=LAYOUTS, cut=[(0, [range(5, 23)]), (0, [range(90, 96), range(8)]), (1, [range(128, 256)])])
def test_a_slice_is_that_of_the_whole(made: Made, layout: str, cut: tuple[int, list[range]]) -> None:
    """Also where zeros of eight outputs are in one integer, and the slice begins between them."""
    packed, plain = (inspect(folder) for folder in made(layout))
    dim, parts = cut
    found = packed.read(NAME, dim=dim, parts=parts, dtype=torch.float16)  # which packed weights do not have
    wanted = plain.read(NAME, dim=dim, parts=parts)
    assert torch.equal(numbers(found, str(packed.tensors[NAME].storage), wanted.shape[1]), wanted)


@pytest.mark.parametrize(("layout", "num_groups"), [("gptq, sorted", 6), ("compressed-tensors, sorted", 12)])
def test_parts_of_scattered_inputs_are_of_one_size_however_they_are_cut(
    made: Made, layout: str, num_groups: int
) -> None:
    """Also with no input of a group; experts of a layer are stacked."""
    packed, plain = (inspect(folder) for folder in made(layout))
    name = "model.layers.1.mlp.down_proj.weight"
    for part in (range(8), range(8, 400), range(392, 768)):
        rows = packed.read(name, dim=1, parts=[part])
        wanted = plain.read(name, dim=1, parts=[part])
        assert torch.equal(numbers(rows, "int4_weight_only", len(part)), wanted)
        assert len(rows[0]) == len(part) // 32 + num_groups


PARTS = [
    *(("compressed-tensors, asymmetric", leaf) for leaf in ("weight_packed", "weight_scale", "weight_zero_point")),
    *(("gptq", leaf) for leaf in ("qweight", "scales", "qzeros", "g_idx")),
    ("awq", "qzeros"),
    ("gptq, sorted", "g_idx"),
    ("gptq, bytes", "qweight"),
    ("gptq, bytes", "qzeros"),
    ("gptq, bytes", "scales"),
    ("int8", "weight_scale"),
    ("int8", "weight"),
    ("float", "weight_scale"),
    ("fp8", "weight_scale_inv"),
    ("nf4", "weight"),
    ("nf4", "weight.absmax"),
    ("nf4, twice", "weight.nested_absmax"),
    ("nf4, twice", "weight.nested_quant_map"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ("fp4, twice", "weight.absmax"),
    ("int8 of bitsandbytes", "SCB"),
    ("mxfp4-pack-quantized", "weight_packed"),
    ("nvfp4-pack-quantized", "weight_scale"),
    ("nvfp4-pack-quantized", "weight_global_scale"),
]
Change = Callable[[Tensor], Tensor]
MISFITS: list[tuple[str, str, Change]] = [
    *((*part, lambda stored: stored[1:].clone()) for part in PARTS),
    ("int8", "weight", Tensor.short),
    ("gptq", "qweight", Tensor.short),
    ("gptq", "qzeros", Tensor.short),
    ("int8 of bitsandbytes", "weight_format", lambda stored: stored + 2),  # the order of old GPUs
]


@pytest.mark.parametrize(("layout", "leaf", "change"), MISFITS)
def test_parts_that_do_not_fit_each_other_are_refused(
    made: Made, tmp_path: Path, layout: str, leaf: str, change: Change
) -> None:
    storages = r"(int\d_\w+|fp8_\w+|nf4|fp4|mxfp4|nvfp4)"
    with pytest.raises(CheckpointError, match=f"no {storages} weight for model.layers.1.*k_proj"):
        inspect(with_part(made(layout)[0], tmp_path, leaf, change))


@pytest.mark.parametrize(
    ("layout", "leaf", "change", "sentence"),
    [
        *(
            (layout, leaf, lambda stored: stored.roll(128), rf"k_proj\.{leaf}, and its config.json does not say so")
            for layout, leaf in (("gptq", "g_idx"), ("compressed-tensors", "weight_g_idx"))
        ),
        ("gptq, bytes", "qzeros", lambda stored: stored + 1, "other zeros than the middle in .*k_proj.qzeros, and its"),
        (
            "gptq, sorted",
            "g_idx",
            lambda stored: stored.where(torch.arange(384) != 130, 3),
            r"k_proj.g_idx of other groups than 3 of 128 inputs: copy",
        ),
    ],
)
def test_groups_and_zeros_are_refused_that_are_others_than_the_config_says(
    made: Made, tmp_path: Path, layout: str, leaf: str, change: Change, *, sentence: str
) -> None:
    checkpoint = inspect(with_part(made(layout)[0], tmp_path, leaf, change))
    for dim in (None, 1):
        with pytest.raises(CheckpointError, match=sentence):
            checkpoint.read(NAME, dim=dim, parts=[range(128, 256)])


@pytest.mark.parametrize("order", [None, False, "weight", "static"])
def test_an_order_that_leaves_groups_in_place_is_read(made: Made, tmp_path: Path, order: object) -> None:
    folder = Path(shutil.copytree(made("compressed-tensors")[0], tmp_path / "packed"))
    described = changed("compressed-tensors", *WEIGHTS, actorder=order) | {"transform_config": {}}
    edit_config(folder, quantization_config=described)
    assert inspect(folder).tensors[NAME].storage == "int4_weight_only"


def with_part(origin: Path, tmp_path: Path, leaf: str, change: Change) -> Path:
    """A copy of a checkpoint in which a part of one weight is changed, or that of another kind of weights is added."""
    name = f"{NAME.removesuffix('weight')}{leaf}"
    groups = torch.arange(384, dtype=torch.int32) // 128
    return edited(origin, tmp_path, lambda tensors: tensors.update({name: change(tensors.get(name, groups))}))


def edited(origin: Path, tmp_path: Path, edit: Edit) -> Path:
    """A copy of a checkpoint with other tensors."""
    folder = Path(shutil.copytree(origin, tmp_path / "packed"))
    edit_tensors(folder / "model.safetensors", edit)
    return folder

"""Quantized checkpoints in the form of their makers: the bytes of transformers' modules, by ignore and target lists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.reading import check_readable
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.extensions.modules.building import build_empty
from llama_ssp.extensions.modules.described import modules_of
from llama_ssp.planning.model import PlannedModel, planned_model
from llama_ssp.planning.weights import model_bytes
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.models import FAMILIES, refusal, tiny_config

pytestmark = of_all_formats
MAKERS = yaml.safe_load(Path(__file__).with_name("makers.yaml").read_text())


def save(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **content}))


def wanted_bytes(folder: Path, model: PlannedModel, packed: str) -> int:
    """Bytes of transformers' modules, whose weights of matching names are in the storage format of the plan."""
    built, packing, total = build_empty(inspect(folder, config_alone=True)), model.storage.packing, 0
    tied = built.all_tied_weights_keys
    for name, found in built.named_parameters():
        if name in tied or not (found.dim() > 1 and re.search(packed, name)):
            total += 2 * found.numel() * (name not in tied)
            continue
        assert model.layout
        width = found.shape[-1]
        group = (model.layout.group or width) if packing.groups else 0
        total += packing.matrix_bytes(found.numel(), 2, group=group) + packing.row_bytes * found.numel() // width
    return total


@pytest.mark.parametrize("given", [pytest.param(each, id=each["name"]) for each in MAKERS])
def test_lists_of_makers_leave_out_the_modules_that_their_files_do(given: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, given["config"] | {"quantization_config": given["quantization"]})
    assert refusal(lambda: check_readable(tmp_path, "none")) == ""
    model = planned_model(ModelConfig(name="mine", path=str(tmp_path), dtype=Dtype.bf16), device="cuda")
    assert model.stored_format
    assert model.stored_format.storage
    save(tmp_path, given["config"])
    planned = model_bytes(inventory(model.shape), model, device="cuda").total_bytes
    assert planned == pytest.approx(wanted_bytes(tmp_path, model, given["packed"]), rel=0.01)


WRITTEN = [name for name in FAMILIES if record_of(name.partition(",")[0]).is_written]


@pytest.mark.parametrize("family", WRITTEN)
def test_matrices_have_the_names_of_the_library(family: str, tmp_path: Path) -> None:
    save(tmp_path, tiny_config(family).to_dict())
    origin = inspect(tmp_path, config_alone=True)
    library, ours = modules_of(build_empty(origin), origin.shape), inventory(origin.shape)

    def names(number: int) -> set[str]:
        """Of a layer; a list of ours has the two first matrices of a shared MLP in one."""
        found = {matrix.named(number) for matrix in ours.by_layer(number).layer}
        known = {matrix.named(number) for matrix in library.by_layer(number).layer}
        joined = {name for name in found - known if name.endswith("gate_up_proj")}
        parts = {name.replace("gate_up", part) for name in joined for part in ("gate", "up")}
        assert {name for name in known - found if not name.endswith(".shared_expert_gate")} == parts
        return found - known - joined

    outside = {name for number in range(library.num_layers) for name in names(number)}
    assert outside <= {"model.per_layer_model_projection"}

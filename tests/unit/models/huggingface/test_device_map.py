"""Targets that accelerate places: the library's logits wherever layers wait, and what the plan says in memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_ssp.errors import PlacementError
from llama_ssp.models.huggingface import device_map
from llama_ssp.models.huggingface.device_map import Place, check_device_map, load_device_map
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.loading import build_empty, find_sources
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.planning.memory import RowBytes, row_bytes
from llama_ssp.planning.spec import PlannedModel
from llama_ssp.settings.schema import Dtype, Offload, TargetKind
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, library_logits
from tests.helpers.planning import make_job
from tests.unit.models.conftest import Saved

pytestmark = pytest.mark.seconds

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", index) for index in range(3))
FAMILIES = ("llama", "gpt_neox", "qwen3")
SavedModels = Callable[[str], Saved]


def on_disk(folder: Path, max_bytes: int) -> Place:
    return Place(devices=(CPU,), offload=Offload.disk, max_bytes=max_bytes, folder=folder / "offload")


def _sizes(folder: Path, *, num_devices: int = 1) -> RowBytes:
    """What a saved model takes in fp32."""
    shape = inspect(folder).shape
    planned = PlannedModel(name="saved", shape=shape, dtype=Dtype.fp32, quantization="none")
    return row_bytes(make_job(planned, num_ranks=num_devices, target_kind=TargetKind.accelerate, device="cpu"))


def absent(runner: ModuleRunner) -> set[str]:
    """Layers whose parameters are nowhere in memory."""
    names = [name for name, parameter in runner._model.named_parameters() if parameter.is_meta]
    return {name.partition("layers.")[2].partition(".")[0] for name in names}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_held", [None, 0, 1])
def test_ragged_rows_get_the_librarys_logits_wherever_layers_wait(
    saved: SavedModels, family: str, num_held: int | None, tmp_path: Path
) -> None:
    folder, model = saved(family)
    origin = inspect(folder)
    place = Place(devices=(CPU,))
    if num_held is not None:
        sizes = _sizes(folder)
        place = on_disk(tmp_path, sizes.before + sizes.after + num_held * sizes.layer)
    runner = load_device_map(origin, place, dtype=None)
    assert absent(runner) == ({"0", "1"} if num_held == 0 else {"1"} if num_held else set())
    runner.allocate(batch_size=2, capacity=24)
    ids_BT = torch.randint(0, VOCAB_SIZE, (2, 14), generator=torch.Generator().manual_seed(1))
    lengths_B1 = torch.tensor([[9], [5]])
    with torch.inference_mode():
        runner.forward(ids_BT[:, :9], torch.arange(9).expand(2, -1), bucket=16)
        steps_B5 = lengths_B1 + torch.arange(5)
        wanted_B2 = torch.tensor([[4, 0], [2, 4]])
        logits_B2V = runner.forward(ids_BT.gather(1, steps_B5), steps_B5, bucket=16, score_positions_BR=wanted_B2)
    for row, length in enumerate(lengths_B1[:, 0].tolist()):
        expected_TV = library_logits(model, ids_BT[row, : length + 5])
        torch.testing.assert_close(logits_B2V[row], expected_TV[length + wanted_B2[row]], atol=2e-5, rtol=0)


def test_layers_on_disk_are_the_ones_that_wait_and_are_read_anew_by_every_forward(
    saved: SavedModels, tmp_path: Path
) -> None:
    folder, _ = saved("llama")
    sizes = _sizes(folder)
    place = on_disk(tmp_path, sizes.before + sizes.after + sizes.layer)
    runner = load_device_map(inspect(folder), place, dtype=None)
    assert place.folder
    files = sorted(place.folder.iterdir())
    assert {file.name.split(".")[2] for file in files} == {"1"}
    assert sum(file.stat().st_size for file in files) == sizes.layer
    runner.allocate(batch_size=1, capacity=16)
    ids_BT, positions_BT = torch.arange(8)[None], torch.arange(8)[None]
    before = runner.forward(ids_BT, positions_BT, bucket=8)
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    assert not torch.equal(runner.forward(ids_BT, positions_BT, bucket=8), before)
    assert absent(runner) == {"1"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_survive_the_disk_bit_by_bit(saved: SavedModels, dtype: torch.dtype, tmp_path: Path) -> None:
    origin, ids_BT = inspect(saved("llama")[0]), torch.arange(20, 32)[None]
    half = _sizes(saved("llama")[0])
    places = (Place(devices=(CPU,)), on_disk(tmp_path, (half.before + half.after) // 2))
    logits = []
    for place in places:
        runner = load_device_map(origin, place, dtype=dtype)
        runner.allocate(batch_size=1, capacity=16)
        logits.append(runner.forward(ids_BT, torch.arange(12)[None], bucket=16))
    assert absent(runner) == {"0", "1"}
    assert torch.equal(*logits)


@pytest.mark.parametrize("form", ["int8", "nf4", "int8_weight_only", "int4_weight_only"])
def test_quantized_layers_run_layer_wise(form: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    runner = load_device_map(
        inspect(tmp_path), Place(devices=(CPU,)), dtype=None, precision=Precision(quantization=form)
    )
    names = {type(module).__name__ for module in runner._model.modules()}
    assert "OwnLinear" in names


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_devices", [2, 3])
def test_each_module_has_one_device_in_order_and_the_head_is_on_the_last(
    saved: SavedModels, family: str, num_devices: int
) -> None:
    origin = inspect(saved(family)[0])
    model, place = build_empty(origin), Place(devices=GPUS[:num_devices])
    names, row = device_map._lay_out(model, find_sources(model, origin), place, dtype=torch.float32)
    placed = device_map._placed(names, row, place)
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert sum(name.startswith(f"{module}.") for module in placed) == 1, name
    assert [placed[name] for name in names.layers] == list(GPUS[:2])
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    assert placed[head] == GPUS[num_devices - 1]
    rotary = next(name for name in placed if name.endswith("rotary_emb"))
    assert placed[rotary] == placed[names.before[0]] == GPUS[0]


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
def test_loader_and_plan_count_the_same_bytes(saved: SavedModels, family: str, num_devices: int) -> None:
    origin = inspect(saved(family)[0])
    sizes = _sizes(saved(family)[0], num_devices=num_devices)
    least = max(sizes.before, sizes.after) if num_devices > 1 else sizes.before + sizes.after
    place = Place(devices=GPUS[:num_devices], offload=Offload.cpu, max_bytes=least)
    check_device_map(origin, place, dtype=None, quantization="none")
    with pytest.raises(PlacementError, match="never offloaded"):
        check_device_map(origin, replace(place, max_bytes=least - 1), dtype=None, quantization="none")


def test_the_kernel_for_one_gpu_per_rank_is_refused_over_several(saved: SavedModels) -> None:
    origin = inspect(saved("llama")[0])
    with pytest.raises(PlacementError, match="use int8, nf4 or none"):
        check_device_map(origin, Place(devices=GPUS), dtype=None, quantization="int8_weight_only")
    check_device_map(origin, Place(devices=GPUS[:1]), dtype=None, quantization="int8_weight_only")

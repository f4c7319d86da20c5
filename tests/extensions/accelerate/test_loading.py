"""Targets that accelerate places: the library's logits, every module on one device, and formats for one GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.errors import PlacementError
from llama_ssp.extensions.accelerate import loading
from llama_ssp.extensions.accelerate.loading import check, load
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.weights import Loading
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.format_extensions import of_all_formats
from tests.helpers.models import build_checkpoint
from tests.helpers.shapes import llama_shape
from tests.unit.models.conftest import Saved
from tests.unit.models.llama.test_decoder import Library, ragged_rounds

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", index) for index in range(3))
FAMILIES = ("llama", "gpt_neox", "qwen3")
SavedModels = Callable[[str], Saved]


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_get_the_librarys_logits(saved: SavedModels, family: str) -> None:
    folder, model = saved(family)
    runner = load(Loading(inspect(folder), devices=(CPU,)))
    runner.allocate(batch_size=3, capacity=40)
    for found, wanted in zip(ragged_rounds(runner), ragged_rounds(Library(model)), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


@of_all_formats
@pytest.mark.parametrize("form", ["int8", "nf4", "int8_weight_only", "int4_weight_only"])
def test_quantized_layers_run_layer_wise(form: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    runner = load(Loading(inspect(tmp_path), precision=Precision(quantization=form), devices=(CPU,)))
    names = {type(module).__name__ for module in runner._model.modules()}
    assert "OwnLinear" in names


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_devices", [2, 3])
def test_each_module_has_one_device_in_order_and_the_head_is_on_the_last(
    saved: SavedModels, family: str, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(loading, "fill_modules", lambda *_args, **_loading: None)
    monkeypatch.setattr(loading, "ModuleRunner", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(loading, "_dispatch", lambda model, placed, first: seen.update(locals()))
    load(Loading(inspect(saved(family)[0]), devices=GPUS[:num_devices]))
    model, placed = seen["model"], seen["placed"]
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert sum(name.startswith(f"{module}.") for module in placed) == 1, name
    before, layers, _ = loading._names(model)
    assert [placed[name] for name in layers] == list(GPUS[:2])
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    assert placed[head] == GPUS[num_devices - 1]
    rotary = next(name for name in placed if name.endswith("rotary_emb"))
    assert placed[rotary] == placed[before[0]] == seen["first"] == GPUS[0]


def check_on(devices: tuple[torch.device, ...], quantization: str, *, rank: int = 0) -> None:
    """Check a target on the first rank."""
    world: Any = SimpleNamespace(device=devices[0], free_devices=devices, comm=SimpleNamespace(rank=rank))
    layout = Layout(target_ranks=(0,), draft_ranks=(), draft_kind=DraftLayout.one_rank)
    check(world, layout, llama_shape(), quantization)


@of_all_formats
def test_the_kernel_for_one_gpu_per_rank_is_refused_over_several() -> None:
    with pytest.raises(PlacementError, match="use int8, nf4 or none"):
        check_on(GPUS, "int8_weight_only")
    check_on(GPUS[:1], "int8_weight_only")
    check_on(GPUS, "nf4")
    check_on(GPUS, "int8_weight_only", rank=1)

"""A target with layer-wise placement over the devices of one rank, dispatched by accelerate (`kind=accelerate`).

`planning.memory` assigns layers to devices. Our loader reads each layer directly to its device, so that neither a
device nor the host ever holds more than its part. Hooks of accelerate move hidden states between devices, and fetch
layers that are offloaded to host memory or disk, matrix by matrix, whenever they are computed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn
from transformers import PreTrainedModel

from llama_ssp.errors import PlacementError
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.loading import Loading, Weights, build_empty, fill_modules, find_sources
from llama_ssp.models.quantization.precision import UNQUANTIZED
from llama_ssp.planning.memory import LayerPlacement, RowBytes, check_offload, split_row
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.formats import NO_QUANTIZATION, format_of, formats
from llama_ssp.settings.schema import Offload
from llama_ssp.weights.source import WeightSource

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The devices of a layer-wise target.

    Attributes:
        devices: at least one; the first takes the ids and returns the logits.
        offload: where to keep layers that fit on no device.
        max_bytes: of weights on each device; None without offload.
        folder: for layers offloaded to disk; it is created here, and removed by the caller.
    """

    devices: tuple[torch.device, ...]
    offload: Offload = Offload.none
    max_bytes: int | None = None
    folder: Path | None = None


class _Names(NamedTuple):
    """Names of a model's modules: before the layers, the layers, and after them."""

    before: list[str]
    layers: list[str]
    after: list[str]


def check_device_map(origin: WeightSource, place: Place, *, dtype: torch.dtype | None, quantization: str) -> None:
    """Check what `load_device_map` requires in addition to `loading.check_model`, without loading weights.

    PlacementError if the offload is not supported, or a device has no room for modules that are never offloaded.
    """
    kind = place.devices[0].type
    check_offload(place.offload, quantization=quantization, device=kind)
    if format_of(quantization).one_gpu_per_rank and kind == "cuda" and len(place.devices) > 1:
        others = [each.name for each in formats().values() if each.change_weight and not each.one_gpu_per_rank]
        raise PlacementError(
            f"quantization={quantization} supports one GPU per rank, and a layer-wise placement has "
            f"{len(place.devices)}: use {', '.join(others)} or {NO_QUANTIZATION}, or placement.target.kind=tensor"
        )
    model = build_empty(origin)
    _lay_out(model, find_sources(model, origin), place, dtype=dtype or origin.dtype)


def load_device_map(origin: WeightSource, place: Place, **loading: Unpack[Loading]) -> ModuleRunner:
    """Load a whole model onto the devices of this rank.

    For arguments and errors see `Place`, `loading.load_model` and `check_device_map`.
    """
    model = build_empty(origin)
    sources = find_sources(model, origin)
    names, row = _lay_out(model, sources, place, dtype=loading["dtype"] or origin.dtype)
    placed = _placed(names, row, place)
    counts = [len(held) for held in row.held]
    _log.info("layers on each device: %s; %d offloaded (offload=%s)", counts, len(row.waiting), place.offload.name)
    host = torch.device("cpu")
    places = {name: where if isinstance(where, torch.device) else host for name, where in placed.items()}
    weights = Weights(model, origin, sources, place.devices[0], places=places, **loading)
    on_disk = [names.layers[number] for number in row.waiting] if place.offload is Offload.disk else []
    index = _write_to_disk(model, weights, on_disk, place.folder)
    fill_modules(model, weights, loading.get("precision", UNQUANTIZED).kernel)
    _dispatch(model, placed, place, index)
    return ModuleRunner(model, comm=Comm.single(), cache_dtype=loading.get("precision", UNQUANTIZED).cache_dtype)


def _lay_out(
    model: PreTrainedModel, sources: Mapping[str, str], place: Place, *, dtype: torch.dtype
) -> tuple[_Names, LayerPlacement]:
    """Name the parts of a model, and assign its layers to devices."""
    names = _names(model)

    def read(modules: Sequence[str]) -> dict[str, int]:
        """Bytes of these modules by stored tensor, tied ones once."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return {
            source: parameters[name].numel() * dtype.itemsize
            for name, source in sources.items()
            if name.startswith(tuple(f"{module}." for module in modules))
        }

    before, after = read(names.before), read(names.after)
    if len(place.devices) == 1:
        after = {source: size for source, size in after.items() if source not in before}
    sizes = RowBytes(layer=sum(read(names.layers[:1]).values()), before=sum(before.values()), after=sum(after.values()))
    return names, split_row(len(names.layers), sizes, num_devices=len(place.devices), max_bytes=place.max_bytes)


def _names(model: PreTrainedModel) -> _Names:
    num_layers = model.config.num_hidden_layers
    stacks = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    before: list[str] = []
    after: list[str] = []
    module: nn.Module = model
    prefix = ""
    for part in stacks[0].split("."):
        side = before
        for name, child in module.named_children():
            if name == part:
                side = after
            else:
                # Modules without weights, such as rotary angles, are computed once, for the first layer.
                (side if next(child.parameters(), None) is not None else before).append(prefix + name)
        module, prefix = module.get_submodule(part), f"{prefix}{part}."
    return _Names(before=before, layers=[f"{stacks[0]}.{number}" for number in range(num_layers)], after=after)


def _placed(names: _Names, row: LayerPlacement, place: Place) -> dict[str, torch.device | str]:
    """The place of each module: a device, or `cpu` or `disk` if offloaded."""
    placed: dict[str, torch.device | str] = dict.fromkeys(names.before, place.devices[0])
    for device, held in zip(place.devices, row.held, strict=True):
        placed |= {names.layers[number]: device for number in held}
    placed |= {names.layers[number]: place.offload.value for number in row.waiting}
    return placed | dict.fromkeys(names.after, place.devices[-1])


def _write_to_disk(
    model: PreTrainedModel, weights: Weights, names: Sequence[str], folder: Path | None
) -> dict[str, Any]:
    """Read layers one by one and write each into a folder; returns accelerate's index of them."""
    from accelerate.utils import offload_weight  # noqa: PLC0415 - needed only by this kind of target

    index: dict[str, Any] = {}
    for name in names:
        assert folder is not None, "offload to disk has a folder"
        folder.mkdir(parents=True, exist_ok=True)
        weights.fill(f"{name}.")
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                offload_weight(parameter.data, f"{path}.{leaf}", str(folder), index)
                setattr(module, leaf, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return index


def _dispatch(
    model: PreTrainedModel, placed: Mapping[str, torch.device | str], place: Place, index: dict[str, Any]
) -> None:
    """Add accelerate's hooks to a filled model; a single device needs none."""
    if len(set(placed.values())) == 1:
        return
    from accelerate import dispatch_model  # noqa: PLC0415 - needed only by this kind of target

    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns about the requested offload

    def named(where: torch.device | str) -> int | str:
        if isinstance(where, str):
            return where
        return where.index if where.type == "cuda" else where.type

    dispatch_model(
        model,
        {name: named(where) for name, where in placed.items()},
        main_device=named(place.devices[0]),
        offload_dir=str(place.folder) if index else None,
        offload_index=index or None,
        skip_keys=model._skip_keys_device_placement,
    )

"""A target with layer-wise placement over the devices of one rank, dispatched by accelerate (`kind=accelerate`).

`records` assigns layers to devices. Our loader reads each layer directly to its device, so that neither a
device nor the host ever holds more than its part. Hooks of accelerate move hidden states between devices.
"""

import logging
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import PlacementError
from llama_ssp.extensions.accelerate.records import split_layers
from llama_ssp.extensions.modules.building import fill_modules, layers_of, match_modules
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.world import World
from llama_ssp.settings.layout import Layout
from llama_ssp.storage.formats import NO_QUANTIZATION, format_of, formats

_log = logging.getLogger(__name__)


def check(world: World, layout: Layout, _shape: ModelShape, quantization: str) -> None:
    """Raise PlacementError if a format works on one GPU per rank only; `models.loading.check_model` checks the rest."""
    devices = world.free_devices if world.comm.rank in layout.target_ranks else (world.device,)
    if format_of(quantization).one_gpu_per_rank and devices[0].type == "cuda" and len(devices) > 1:
        others = [record.name for record in formats().values() if record.change_weight and not record.one_gpu_per_rank]
        raise PlacementError(
            f"quantization={quantization} supports one GPU per rank, and a layer-wise placement has "
            f"{len(devices)}: use {', '.join(others)} or {NO_QUANTIZATION}, or placement.target.kind=tensor"
        )


def load(loading: Loading) -> ModuleRunner:
    """Load a whole model onto the devices of this rank; the first takes the ids and returns the logits.

    For errors see `models.loading.load_model` and `check`.
    """
    devices = loading.devices
    model, matched = match_modules(loading.origin)
    before, layers, after = _names(model)
    held = split_layers(len(layers), num_devices=len(devices))
    _log.info("layers on each device: %s", [*map(len, held)])
    placed = dict.fromkeys(before, devices[0])
    for device, numbers in zip(devices, held, strict=True):
        placed |= {layers[number]: device for number in numbers}
    placed |= dict.fromkeys(after, devices[-1])
    fill_modules(model, matched.sources, {"": devices[0], **placed}, loading.precision.kernel, loading)
    _dispatch(model, placed, devices[0])
    return ModuleRunner(model, comm=Comm.single(), cache_dtype=loading.precision.cache_dtype)


def _names(model: PreTrainedModel) -> tuple[list[str], list[str], list[str]]:
    """Return the names of a model's outermost modules: those before the layers, the layers, and those after them."""
    modules, (stack, layers) = dict(model.named_modules()), layers_of(model)
    before, after = list[str](), list[str]()
    side = before
    for name, module in modules.items():
        side = after if name == stack else side
        is_inner = name.startswith(tuple(f"{outer}." for outer in (stack, *before, *after)))
        if not (is_inner or f"{stack}.".startswith(f"{name}.") or module is model):
            # Modules without weights, such as rotary angles, are computed once, for the first layer.
            (side if next(module.parameters(), None) is not None else before).append(name)
    return before, [f"{stack}.{number}" for number in range(len(layers))], after


def _dispatch(model: PreTrainedModel, placed: Mapping[str, torch.device], first: torch.device) -> None:
    """Add accelerate's hooks to a filled model; a single device needs none."""
    if len(set(placed.values())) == 1:
        return
    from accelerate import dispatch_model

    def named(where: torch.device) -> int | str:
        return where.index if where.type == "cuda" else where.type

    dispatch_model(
        model,
        {name: named(where) for name, where in placed.items()},
        main_device=named(first),
        skip_keys=model._skip_keys_device_placement,
    )

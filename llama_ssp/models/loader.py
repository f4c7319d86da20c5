"""Fill an empty model with this rank's slices of a checkpoint.

First every parameter's source is found by name and its shape compared, so that a faulty checkpoint is named before a
byte is loaded; then one tensor at a time is read, cast and placed, so that host memory never holds more than the rank's
own slices and one tensor. Swapping modules for local ones is the business of `tensor_parallel`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from llama_ssp.errors import CheckpointError
from llama_ssp.models.checkpoint import Checkpoint, summary
from llama_ssp.models.tensor_parallel import LocalModule, Slice

Progress = Callable[[int, int], None]


def find_sources(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """Say under which name the checkpoint stores each parameter.

    Args:
        model: the whole model, before `tensor_parallel.shard`.
        checkpoint: its files.

    Returns:
        Name in the checkpoint by name in the model, in the model's order. Tied parameters share a source where the
        checkpoint stores only one of them.

    Raises:
        CheckpointError: parameters are missing, have another shape, or are not floating-point numbers.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored = _model_names(model, checkpoint, parameters)
    ties: dict[str, str] = model.all_tied_weights_keys
    partners = ties | {source: target for target, source in ties.items()}
    sources = {name: stored.get(name) or stored.get(partners.get(name, "")) for name in parameters}
    missing = [name for name, source in sources.items() if source is None]
    if missing:
        message = (
            f"{checkpoint.folder} lacks {len(missing)} of the {len(parameters)} tensors that its config.json calls for "
            f"({summary(missing)}): copy or download it again"
        )
        raise CheckpointError(message)
    found = {name: source for name, source in sources.items() if source is not None}
    unfit = [
        f"{source} is {list(tensor.shape)}, not {list(parameters[name].shape)}"
        if tensor.shape != parameters[name].shape
        else f"{source} holds no floating-point numbers"
        for name, source in found.items()
        if (tensor := checkpoint.tensors[source]).shape != parameters[name].shape or tensor.dtype is None
    ]
    if unfit:
        message = f"{checkpoint.folder} does not fit its config.json, which may be another model's: {summary(unfit)}"
        raise CheckpointError(message)
    return found


def _model_names(
    model: PreTrainedModel, checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter]
) -> dict[str, str]:
    """Name in the checkpoint by the name that the library gives it in the model."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamed: dict[str, str] = {}
    for name in checkpoint.names:
        new_name, conversion = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(parameters))
        if conversion is not None:
            message = f"{checkpoint.folder} stores {name} in parts to be joined while loading, which is not supported"
            raise CheckpointError(message)
        renamed[new_name] = name
    return renamed


def load_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    sources: Mapping[str, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Give every parameter its values, and move the buffers; buffers keep their number format.

    Args:
        model: the model with its local modules, parameters on the meta device.
        checkpoint: where to read.
        sources: what `find_sources` returned for the whole model.
        dtype: number format of the parameters.
        device: where they go.
        progress: called after each parameter with the bytes that this rank holds by then, and those it will hold.

    Raises:
        CheckpointError: a file has changed since it was inspected.
    """
    loaded: dict[tuple[str, Slice | None], nn.Parameter] = {}
    total_bytes, done_bytes = _num_values(model, sources) * dtype.itemsize, 0
    for name, source in sources.items():
        module, leaf, piece = _place(model, name)
        if (source, piece) not in loaded:
            dim, parts = (piece.dim, [piece.part]) if piece else (None, [])
            values = checkpoint.read(source, dim=dim, parts=parts, dtype=dtype).to(device)
            loaded[source, piece] = nn.Parameter(values, requires_grad=False)
            done_bytes += values.nbytes
        setattr(module, leaf, loaded[source, piece])
        if progress:
            progress(done_bytes, total_bytes)
    nn.Module.to(model, device)


def _place(model: PreTrainedModel, name: str) -> tuple[nn.Module, str, Slice | None]:
    """Find the module that holds a parameter, its name there, and which slice of the whole tensor it is."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return module, leaf, module.slices.get(leaf) if isinstance(module, LocalModule) else None


def _num_values(model: PreTrainedModel, sources: Mapping[str, str]) -> int:
    """Count the values that this rank will hold, tied ones once."""
    sizes = {}
    for name, source in sources.items():
        module, leaf, piece = _place(model, name)
        sizes[source, piece] = getattr(module, leaf).numel()
    return sum(sizes.values())

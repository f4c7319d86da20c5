"""Quantized layers inside the modules of transformers, and the checks before quantizing a model.

Shapes: B sequences, T positions, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from llama_ssp.architectures.sharding import RankShard, cut_of, split_model
from llama_ssp.config.formats import format_of, formats
from llama_ssp.config.schema import ModelShape, WholeParts
from llama_ssp.errors import CheckpointError, ConfigError, PlacementError
from llama_ssp.kernels.linear import BLOCK, COMPILED, Kernel, Linear, product_of
from llama_ssp.models.tensor_parallel import ColumnLinear, GatheredLinear, RowLinear, is_row_parallel, is_sharded
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.source import WeightSource


class QuantizedLinear(nn.Module):
    """Replaces a linear layer of transformers, or this rank's slice of it, and empties it."""

    def __init__(self, module: nn.Linear | ColumnLinear | RowLinear, quantize: Kernel) -> None:
        super().__init__()
        weight_OI, bias_O = module.weight.detach(), module.bias
        del module.weight
        self._row = module if isinstance(module, RowLinear) else None
        self._form: Linear = quantize(weight_OI, None if self._row else bias_O)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the input (B, T, I), or this rank's part of it, to (B, T, O)."""
        y_BTO = self._form(x_BTI.flatten(0, -2)).unflatten(0, x_BTI.shape[:-1])
        return self._row.summed(y_BTO) if self._row else y_BTO


def quantize_modules(model: PreTrainedModel, quantize: Kernel, *, fill: Callable[[str], None]) -> None:
    """Quantize the linear layers of a sharded, empty model, one by one as `fill` loads them."""
    for name, module in list(_linear_layers(model)):
        fill(f"{name}.")
        model.set_submodule(name, QuantizedLinear(module, quantize))


def check_packed(model: PreTrainedModel, origin: WeightSource, sources: Mapping[str, str], quantization: str) -> None:
    """Check that weights which are stored packed belong to the layers that are quantized, and that all of those are.

    ConfigError if `quantization` is another format; CheckpointError if only some of the layers are packed.
    """
    packed = {name for name, source in sources.items() if origin.tensors[source].is_packed}
    if not packed:
        return
    if not format_of(quantization).reads_packed:
        able = ", ".join(storage.name for storage in formats().values() if storage.reads_packed)
        raise ConfigError(
            f"{origin.folder} holds weights of 4 bits, and model.quantization={quantization} was given: "
            f"model.quantization={able} (draft.model.quantization for a draft) is required"
        )
    odd = sorted(packed ^ {f"{name}.weight" for name, _ in _linear_layers(model)})
    if odd:
        raise CheckpointError(
            f"{origin.folder} must hold 4 bits for all linear layers of the decoder layers and for nothing else, which "
            f"is not so for {summary(odd)}: quantize the original checkpoint with model.quantization={quantization}"
        )


def check_quantizable(
    model: PreTrainedModel, shape: ModelShape, quantization: str,
    *,
    num_ranks: int, whole: WholeParts = WholeParts.none, compiles: bool = False,
) -> None:  # fmt: skip
    """Check that a whole model, before `tensor_parallel.shard`, can be quantized; reads no weights.

    `compiles` says that layers take compiled products where those fit, as on a CPU without `int8_threshold`.
    ConfigError if a package is missing that a layer needs; PlacementError if the inputs of a layer, or of a rank's
    slice of it, are no multiple of the format's group size.
    """
    storage = format_of(quantization)
    shards = split_model(shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    if (package := storage.package) and find_spec(package.name) is None:
        has_product = compiles and quantization in COMPILED and product_of(COMPILED[quantization]) is not None
        if not has_product or (odd := _of_no_whole_blocks(model, shards, whole)):
            where = f" for {summary(odd)}, whose sizes are no multiples of {BLOCK}" if has_product else ""
            raise ConfigError(
                f"quantization={quantization} needs the package {package.name}{where}: {package.install} installs it, "
                "or use quantization=int8_weight_only, which needs none"
            )
    for name, module in _linear_layers(model) if storage.group > 1 else ():
        is_cut = num_ranks > 1 and is_row_parallel(model, name, whole=whole)
        for width in {len(s.features(cut_of(name))) for s in shards} if is_cut else {module.in_features}:
            if width % storage.group:
                where = f" on one of {num_ranks} ranks" if is_cut else ""
                raise PlacementError(
                    f"{storage.name} packs {storage.group} inputs at a time, and {name} has {width}{where}: "
                    f"use {'another number of ranks, or ' if is_cut else ''}quantization=int8_weight_only"
                )


def _of_no_whole_blocks(model: PreTrainedModel, shards: Sequence[RankShard], whole: WholeParts) -> list[str]:
    """The linear layers that compiled products do not fit on some rank."""
    odd = []
    for name, module in _linear_layers(model):
        sizes = {module.weight.shape[0], module.weight.shape[1]}
        if len(shards) > 1 and is_sharded(model, name, whole=whole):
            sizes |= {len(shard.features(cut_of(name))) for shard in shards}
        if any(size % BLOCK for size in sizes):
            odd.append(name)
    return odd


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """All linear layers except the output head, whole or sharded, by name."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | ColumnLinear | RowLinear)
        if is_linear and module is not head and not isinstance(module, GatheredLinear):
            yield name, module

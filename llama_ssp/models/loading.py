"""Loads this rank's part of a model, and checks before any rank starts that it can.

Llama-like models and draft heads are built as our decoder at once, from a table of their parameters (`llama.table`).
Other families run on the modules of transformers (`huggingface.loading`), which are imported for them alone.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

from transformers import PretrainedConfig

from llama_ssp import operators
from llama_ssp.architectures.family import kept_whole, record_of
from llama_ssp.architectures.matrices import RankShard, WholeParts, check_inputs, split_model
from llama_ssp.architectures.stages import stage_layers
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.llama.table import match_lean
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import LINEAR, Loading, Parameter, returning_memory
from llama_ssp.ranks.comms import Comm
from llama_ssp.registry import imported
from llama_ssp.storage.formats import NO_QUANTIZATION, easiest_format, format_of
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.source import PACKED, WeightSource, tap_source

_log = logging.getLogger(__name__)


def load_model(loading: Loading) -> Runner:
    """Load this rank's slices of a model, in the lean decoder if that supports the family.

    Of a draft head, the result is what its source names, whose forwards are not those of a `Runner`.

    Weights that go into a model that runs give another one if some layer needs another kernel for them.

    Raises:
        CheckpointError: tensors are missing or have another shape, or a file has changed.
        ConfigError: the static cache cannot serve this model.
        PlacementError: the model cannot be split over these ranks.
    """
    origin = loading.origin
    if not is_llama_kind(origin.config):
        from llama_ssp.models.huggingface.loading import load_library  # noqa: PLC0415 - slow import

        return load_library(loading)
    head = tap_source(origin)
    kind: type[LeanRunner] = imported(head.lean_runner, setting="draft") if head else LeanRunner
    with returning_memory():
        lean = kind(loading)
    return cast("LeanRunner", loading.into.model) if loading.into.fits else lean


def is_llama_kind(config: PretrainedConfig) -> bool:
    """Whether the lean decoder supports this model."""
    if not record_of(config.model_type).is_llama_kind or config.hidden_act != "silu":
        return False
    rope: dict[str, Any] = config.rope_parameters or {}
    return bool(rope.get("partial_rotary_factor", 1.0) == 1.0)


def check_model(
    origin: WeightSource, *,
    num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none, compiles: bool = False,
    grouped_bytes: int = 0, num_stages: int = 1,
) -> None:  # fmt: skip
    """Raise every error that `load_model` would raise, without loading weights.

    The ranks are those of each stage. `compiles` says that layers take compiled products where these fit, as on a CPU;
    `grouped_bytes` are those of a number in the products of all experts at once, as on a GPU, and 0 without.

    Raises:
        CheckpointError: tensors are missing or have another shape.
        ConfigError: the static cache cannot serve this model, or it cannot be quantized.
        PlacementError: the family is not supported, or cannot be split over these ranks in this precision.
    """
    whole, model = kept_whole(origin.shape, whole), None
    ignored: Collection[str] = ()
    shards = split_model(origin.shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    stage_layers(origin.shape, num_stages)
    if is_llama_kind(origin.config):
        matched = match_lean(origin, whole)
    else:
        from llama_ssp.models.huggingface.loading import (  # noqa: PLC0415 - slow import
            check_grouped_experts,
            check_quantized_experts,
        )
        from llama_ssp.models.huggingface.modules import match_modules  # noqa: PLC0415 - slow import
        from llama_ssp.models.tensor_parallel import shard  # noqa: PLC0415 - slow import

        model, matched = match_modules(origin, num_ranks=num_ranks, whole=whole)
        ignored = model._keys_to_ignore_on_load_unexpected or ()
    kept = matched.check_packed(quantization)
    names = matched.unread(ignored)
    if names and origin.shape.is_head:
        raise CheckpointError(
            f"{origin.folder} holds tensors that no part of this head takes ({summary(names)}): it is of another kind "
            "than its config.json says, so copy or download both again"
        )
    if names:
        _log.warning("%s holds tensors that no module takes, which are not read: %s", origin.folder, summary(names))
    packed, storage = next(filter(PACKED, origin.tensors.values()), None), format_of(quantization)
    group = (packed and packed.group) or storage.packing.least_group
    check = partial(check_inputs, quantization, group=group, num_ranks=num_ranks, is_stored=packed is not None)
    if model:
        check_quantized_experts(model, origin.shape, quantization, num_ranks=num_ranks, check=check)
        if grouped_bytes and not storage.is_quantized:
            check_grouped_experts(model, shards, value_bytes=grouped_bytes)
    linears = {layer: weight for name, weight in matched.table.items()
               if weight.role is LINEAR and (layer := name.removesuffix(".weight")) not in kept}  # fmt: skip
    _check_quantizable(linears, shards, quantization, compiles=compiles, check=check)
    if model:
        shard(model, origin.shape, Comm(rank=0, size=num_ranks), own=shards[0], whole=whole)


def _check_quantizable(
    linears: Mapping[str, Parameter], shards: Sequence[RankShard], quantization: str, *, compiles: bool,
    check: Callable[..., None],
) -> None:  # fmt: skip
    """Check that the weights of linear layers can be quantized.

    ConfigError if a package is missing that a layer needs; PlacementError if the inputs of a layer, or of a rank's
    slice of it, are no multiple of the format's group size.
    """
    storage = format_of(quantization)

    def sizes(weight: Parameter, dim: int) -> set[int]:
        """The sizes of a layer, or of its slices on all ranks."""
        if weight.dim == dim and weight.units:
            return {shard.num_features(weight.units, weight.shape[dim]) for shard in shards}
        return {weight.shape[dim]}

    if (package := storage.package) and find_spec(package.name) is None:
        block: int | None = operators.made("packed_block", "cpu", storage) if compiles else None
        odd = [name for name, weight in linears.items()
               if block and any(size % block for size in sizes(weight, 0) | sizes(weight, 1))]  # fmt: skip
        if odd or not block:
            where = f" for {summary(odd)}, whose sizes are no multiples of {block}" if block else ""
            other = easiest_format()
            remedy = "" if other == NO_QUANTIZATION else f", or use quantization={other}, which needs none"
            raise ConfigError(
                f"quantization={quantization} needs the package {package.name}{where}: {package.install} installs it"
                f"{remedy}"
            )
    for name, weight in linears.items():
        check(name, sizes(weight, 1), is_cut=len(shards) > 1 and weight.dim == 1)

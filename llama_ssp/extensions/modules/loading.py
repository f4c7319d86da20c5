"""Loads and checks models that run on the modules of transformers.

A model that the lean decoder runs does not import this: the models of transformers take seconds to import.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

from torch import nn

from llama_ssp.architectures.matrices import Cut, RankShard, WholeParts, check_experts, split_model
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.modules.building import OwnLinear, load_modules, match_modules, name_of
from llama_ssp.extensions.modules.experts import can_be_own, experts_of
from llama_ssp.extensions.modules.runner import ModuleRunner
from llama_ssp.extensions.modules.tensor_parallel import shard
from llama_ssp.kernels.linear import make_linear
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.registry import imported
from llama_ssp.storage.formats import format_of
from llama_ssp.text.messages import said
from llama_ssp.weights.source import WeightSource, tap_source


def load_library(loading: Loading) -> ModuleRunner:
    """Load this rank's slices into the modules of transformers; see `models.loading.load_model`."""
    head_source, into, on_cpu = tap_source(loading.origin), loading.into, loading.device.type == "cpu"
    target = loading.alike(ModuleRunner)
    # Embedding and output of the target, if this is its head on the same ranks.
    tables = target.tables if target and head_source and target.comm.size == loading.comm.size else None
    model = load_modules(loading, kernel=make_linear if on_cpu else None, tables=tables)
    if on_cpu and not tables and loading.stage.is_last:
        head: Any = model.get_output_embeddings()
        is_tied = head.weight is getattr(model.get_input_embeddings(), "weight", None)
        own_head = OwnLinear(head, partial(make_linear, keeps_weight=is_tied))
        model.set_submodule(name := name_of(model, head), into.keep(own_head, "_model", *name.split(".")))
    before = cast("ModuleRunner", into.model)
    parameters = model.named_parameters(remove_duplicate=False)
    if into.fits and all(before.parameters.get(name) is values for name, values in parameters):
        return before
    kind = imported(head_source.library_runner, setting="draft") if head_source else ModuleRunner
    return kind(model, comm=loading.comm, cache_dtype=loading.precision.cache_dtype, stage=loading.stage)


class MatchedModules:
    """The modules of a model with their parameters matched with its files; see `models.loading.MatchedLibrary`."""

    def __init__(self, origin: WeightSource, *, num_ranks: int, whole: WholeParts) -> None:
        self._origin, self._num_ranks, self._whole = origin, num_ranks, whole
        self._model, self.matched = match_modules(origin, num_ranks=num_ranks, whole=whole)
        self.ignored: Collection[str] = self._model._keys_to_ignore_on_load_unexpected or ()

    @property
    def vocabulary(self) -> tuple[str, str]:
        """See `MatchedLibrary`."""
        tables = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        embedding, output = (self.matched.sources[f"{name_of(self._model, table)}.weight"] for table in tables)
        return embedding, output

    def check_experts(
        self, shards: Sequence[RankShard], quantization: str, *, grouped_bytes: int, check: Callable[..., None]
    ) -> None:
        """See `MatchedLibrary`."""
        _check_quantized(self._model, self._origin.shape, quantization, num_ranks=self._num_ranks, check=check)
        if grouped_bytes and not format_of(quantization).is_quantized:
            _check_grouped(self._model, shards, value_bytes=grouped_bytes)

    def cut(self, own: RankShard) -> None:
        """See `MatchedLibrary`."""
        shard(self._model, self._origin.shape, Comm(rank=0, size=self._num_ranks), own=own, whole=self._whole)


def _check_quantized(
    model: nn.Module, shape: ModelShape, quantization: str, *, num_ranks: int, check: Callable[..., None]
) -> None:
    """Check that experts can be quantized; raises as `models.loading.check_model`."""
    storage, model_type = format_of(quantization), shape.model_type
    for name, module in experts_of(model) if storage.is_quantized else ():
        if not can_be_own(module):
            raise ConfigError(
                f"the experts of {model_type} models cannot be quantized ({name}): use "
                f"{said('model.quantization', 'none')}"
            )
        num_cut = 1 if shape.spreads_experts else num_ranks
        shards = split_model(shape, num_ranks=num_cut, quantization=quantization)
        width, units = (
            matrices.shape[2 - module.is_transposed] for matrices in (module.gate_up_proj, module.down_proj)
        )
        widths = {width, *(shard.num_features(Cut.mlp_units, units) for shard in shards)}
        check(name, widths, is_cut=num_cut > 1, num_experts=shape.num_experts)


def _check_grouped(model: nn.Module, shards: Sequence[RankShard], *, value_bytes: int) -> None:
    """Check that a product of all experts at once can take the part of each rank; raises as `check_experts`."""
    for _, module in experts_of(model):
        turns = bool(getattr(module, "is_transposed", False))  # then a row has gates and units
        check_experts(shards, module.down_proj.shape[2 - turns], value_bytes=value_bytes * (1 + turns))

"""Loads this rank's part of a model, and checks before any rank starts that it can.

Llama-like models and draft heads are built as our decoder at once, from a table of their parameters (`llama.table`).
Other families run on the modules of transformers (`huggingface.modules`).
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from llama_ssp.architectures.family import check_ranks, check_servable, kept_whole
from llama_ssp.architectures.heads import DFLASH, EAGLE3, PEAGLE
from llama_ssp.architectures.matrices import Cut, RankShard, WholeParts, check_inputs, split_model
from llama_ssp.catalogue import ModelShape
from llama_ssp.cpu.kinds import BLOCK
from llama_ssp.errors import ConfigError
from llama_ssp.kernels.linear import make_linear, product_of
from llama_ssp.models.huggingface.experts import can_be_own, experts_of
from llama_ssp.models.huggingface.modules import (
    OwnLinear,
    build_empty,
    load_modules,
    output_name,
    sources_of,
    table_of,
)
from llama_ssp.models.huggingface.mtp import MtpRunner
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.llama.head import HeadRunner, PairRunner
from llama_ssp.models.llama.one_pass import BlockRunner, ParallelRunner
from llama_ssp.models.llama.table import EMBEDDING, OUTPUT, is_llama_kind, llama_table, rotary_of
from llama_ssp.models.quantization.precision import UNQUANTIZED
from llama_ssp.models.runner import Runner
from llama_ssp.models.tensor_parallel import shard
from llama_ssp.models.weights import (
    LINEAR,
    Loading,
    Parameter,
    StoredSlice,
    Weights,
    check_packed,
    config_errors,
    find_sources,
    returning_memory,
    unread,
)
from llama_ssp.ranks.comms import Comm
from llama_ssp.storage.formats import NO_QUANTIZATION, format_of
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.head import HeadSource
from llama_ssp.weights.mtp import MtpSource
from llama_ssp.weights.source import WeightSource, packed_of
from llama_ssp.words import said
from llama_ssp.workspaces import NOWHERE

_log = logging.getLogger(__name__)


def load_model(
    origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]
) -> Runner | PairRunner:
    """Load this rank's slices of a model, in the lean decoder if that supports the family.

    Weights and cache are on `device`, and the ranks of `comm` share the model. Weights that go into a model that runs
    give another one if some layer needs another kernel for them.

    Raises:
        CheckpointError: tensors are missing or have another shape, or a file has changed.
        ConfigError: the static cache cannot serve this model.
        PlacementError: the model cannot be split over these ranks.
    """
    precision, into = loading.get("precision", UNQUANTIZED), loading.get("into", NOWHERE)
    if is_llama_kind(origin.config):
        embedding_VE = _shared_embedding(origin, loading, device)
        weights, shards = lean_weights(origin, device=device, comm=comm, **loading)
        parts: dict[str, Any] = {
            "shards": shards, "comm": comm, "precision": precision, "embedding_VE": embedding_VE, "into": into
        }  # fmt: skip
        with returning_memory():
            if isinstance(origin, HeadSource):
                lean: LeanRunner = _HEADS[origin.head.kind](weights, origin, **parts)
            elif isinstance(origin, MtpSource):
                lean = PairRunner(weights, origin, **parts)
            else:
                lean = LeanRunner(weights, origin.config, **parts)
        return cast("LeanRunner", into.model) if into.fits else lean
    on_cpu = device.type == "cpu"
    kernel, tables = make_linear if on_cpu else None, _shared_tables(origin, loading, device, comm)
    model = load_modules(origin, device=device, comm=comm, kernel=kernel, tables=tables, **loading)
    if on_cpu and not tables:
        head: Any = model.get_output_embeddings()
        is_tied = head.weight is getattr(model.get_input_embeddings(), "weight", None)
        own_head = OwnLinear(head, partial(make_linear, keeps_weight=is_tied))
        model.set_submodule(name := output_name(model), into.keep(own_head, "_model", *name.split(".")))
    if into.fits and (before := cast("ModuleRunner", into.model)).has_parameters_of(model):
        return before
    kind = MtpRunner if origin.shape.is_head else ModuleRunner
    return kind(model, comm=comm, cache_dtype=precision.cache_dtype)


_HEADS = {EAGLE3: HeadRunner, PEAGLE: ParallelRunner, DFLASH: BlockRunner}


def lean_weights(
    origin: WeightSource, *, device: torch.device, comm: Comm, **loading: Unpack[Loading]
) -> tuple[Weights, tuple[RankShard, ...]]:
    """The weights of this rank, by the names of `llama.table`, and what all ranks have; raises as `load_model`."""
    whole, dtype = _whole_parts(origin, loading.get("whole", WholeParts.none)), loading["dtype"] or origin.dtype
    quantization = loading.get("precision", UNQUANTIZED).quantization
    table, sources = _lean_table(origin, whole)
    check_packed(table, origin, sources, quantization)
    shards = split_model(origin.shape, num_ranks=comm.size, quantization=quantization, whole=whole)
    rows = {}
    for name, parameter in table.items():
        cut = parameter.slice_of(shards[comm.rank])
        sizes = list(parameter.shape)
        if cut:
            sizes[cut.dim] = sum(map(len, cut.parts))
        rows[name] = StoredSlice(sources[name], cut, math.prod(sizes), dtype, device)
    if _shared_embedding(origin, loading, device) is not None:
        del rows[EMBEDDING]
    into = loading.get("into", NOWHERE).model
    places = {EMBEDDING: into._embedding_VE} if into else {}
    return Weights(origin, rows, dtype=dtype, progress=loading.get("progress"), places=places), shards


def _lean_table(origin: WeightSource, whole: WholeParts) -> tuple[dict[str, Parameter], dict[str, str]]:
    """The parameters of a whole model or head, and their stored names."""
    check_servable(lambda name: getattr(origin.config, name, None))
    with config_errors(origin.folder):
        rotary_of(origin.config)
    head = origin.head if isinstance(origin, HeadSource) else None
    table = llama_table(origin.config, origin.shape, whole=whole, head=head)
    named = {name if name in table else f"model.{name}": name for name in origin.tensors}
    ties = {OUTPUT: EMBEDDING} if origin.config.tie_word_embeddings and not head else {}
    return table, find_sources(table, origin, named=named, ties=ties)


def _shared_embedding(origin: WeightSource, loading: Loading, device: torch.device) -> Tensor | None:
    """The target's whole embedding, if this is a head without one, on its device and in its dtype."""
    target = loading.get("target")
    if not (origin.shape.shares_embedding and isinstance(target, LeanRunner)):
        return None
    is_alike = (target.device, target.dtype) == (device, loading["dtype"] or origin.dtype)
    return target.embedding if is_alike else None


def _shared_tables(
    origin: WeightSource, loading: Loading, device: torch.device, comm: Comm
) -> tuple[nn.Module, nn.Module] | None:
    """Embedding and output of the target, if this is its MTP head on the same ranks, in its dtype."""
    target = loading.get("target")
    if not (origin.shape.is_head and isinstance(target, ModuleRunner) and target.comm.size == comm.size):
        return None
    is_alike = (target.device, target.dtype) == (device, loading["dtype"] or origin.dtype)
    return target.tables if is_alike else None


def _whole_parts(origin: WeightSource, whole: WholeParts) -> WholeParts:
    """Parts that each rank holds whole: of a head at least the embedding, whose tokens are more than it drafts."""
    whole = kept_whole(origin.shape, whole)
    return WholeParts.embedding if isinstance(origin, HeadSource) and whole is WholeParts.none else whole


def check_model(
    origin: WeightSource, *,
    num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none, compiles: bool = False,
) -> None:  # fmt: skip
    """Raise every error that `load_model` would raise, without loading weights.

    `compiles` says that layers take compiled products where those fit, as on a CPU.

    Raises:
        CheckpointError: tensors are missing or have another shape.
        ConfigError: the static cache cannot serve this model, or it cannot be quantized.
        PlacementError: the family is not supported, or cannot be split over these ranks in this precision.
    """
    whole, model = _whole_parts(origin, whole), None
    ignored: Collection[str] = ()
    shards = split_model(origin.shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    if is_llama_kind(origin.config):
        table, sources = _lean_table(origin, whole)
    else:
        model = build_empty(origin)
        check_ranks(origin.shape.model_type, num_ranks)
        table = table_of(model, num_ranks=num_ranks, whole=whole)
        sources, ignored = sources_of(model, origin, table), model._keys_to_ignore_on_load_unexpected or ()
    kept = check_packed(table, origin, sources, quantization)
    if names := unread(origin, sources.values(), ignored=ignored):
        _log.warning("%s holds tensors that no module takes, which are not read: %s", origin.folder, summary(names))
    packed, storage = packed_of(origin), format_of(quantization)
    group = (packed and packed.group) or storage.least_group
    check = partial(check_inputs, quantization, group=group, num_ranks=num_ranks, is_stored=packed is not None)
    if model:
        _check_experts(model, origin.shape, quantization, num_ranks=num_ranks, check=check)
    linears = {name.removesuffix(".weight"): weight for name, weight in table.items() if weight.role is LINEAR}
    linears = {name: weight for name, weight in linears.items() if name not in kept}
    _check_quantizable(linears, shards, quantization, compiles=compiles, check=check)
    if model:
        shard(model, origin.shape, Comm(rank=0, size=num_ranks), quantization=quantization, whole=whole)


def _check_experts(
    model: nn.Module, shape: ModelShape, quantization: str, *, num_ranks: int, check: Callable[..., None]
) -> None:
    """Check that experts can be quantized; raises as `_check_quantizable`."""
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
        check(name, {width, *(shard.num_features(Cut.mlp_units, units) for shard in shards)}, is_cut=num_cut > 1)


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
        """Those of a layer, or of its slices on all ranks."""
        if weight.dim == dim and weight.units:
            return {shard.num_features(weight.units, weight.shape[dim]) for shard in shards}
        return {weight.shape[dim]}

    if (package := storage.package) and find_spec(package.name) is None:
        has_product = compiles and storage.compiled is not None and product_of(storage.compiled) is not None
        odd = [name for name, weight in linears.items()
               if any(size % BLOCK for size in sizes(weight, 0) | sizes(weight, 1))]  # fmt: skip
        if odd or not has_product:
            where = f" for {summary(odd)}, whose sizes are no multiples of {BLOCK}" if has_product else ""
            raise ConfigError(
                f"quantization={quantization} needs the package {package.name}{where}: {package.install} installs it, "
                "or use quantization=int8_weight_only, which needs none"
            )
    for name, weight in linears.items():
        check(name, sizes(weight, 1), is_cut=len(shards) > 1 and weight.dim == 1)

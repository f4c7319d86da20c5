"""Loads this rank's part of a model, and checks before any rank starts that it can.

Llama-like models and draft heads are built as our decoder at once, from a table of their parameters (`llama.table`).
Other families run on the modules of a `ModelLibrary`, whose code is imported for them alone.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar, cast

from transformers import PretrainedConfig

from llama_ssp.architectures.family import kept_whole, library_of, record_of
from llama_ssp.architectures.matrices import RankShard, WholeParts, check_inputs, split_model
from llama_ssp.architectures.stages import stage_layers
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.llama.table import EMBEDDING, OUTPUT, match_lean
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import LINEAR, Loading, Matched, Parameter, returning_memory
from llama_ssp.registry import imported, operators
from llama_ssp.storage.formats import NO_QUANTIZATION, easiest_format, format_of
from llama_ssp.weights.checkpoint import summary
from llama_ssp.weights.source import PACKED, WeightSource, tap_source

_log = logging.getLogger(__name__)
Origin = TypeVar("Origin", bound=WeightSource)


def load_model(loading: Loading) -> Runner:
    """Load this rank's slices of a model, in the lean decoder if that supports the family.

    For a draft head the result has the class that its source names, whose forwards differ from a `Runner`'s.

    With `loading.into` a running model, the result is another model if some layer needs another kernel.

    Raises:
        CheckpointError: tensors are missing or have another shape, or a file has changed.
        ConfigError: the static cache cannot serve this model.
        PlacementError: the model cannot be split over these ranks.
    """
    origin = loading.origin
    if not is_llama_kind(origin.config):
        runner: Runner = _of_library("load", origin)(loading)
        return runner
    head = tap_source(origin)
    kind: type[LeanRunner] = imported(head.lean_runner, setting="draft") if head else LeanRunner
    with returning_memory():
        lean = kind(loading)
    return cast("LeanRunner", loading.into.model) if loading.into.fits else lean


class MatchedLibrary(Protocol):
    """A model of transformers with its parameters matched with its files, for `check_model` and for draft heads.

    Attributes:
        matched: see `Matched`.
        ignored: patterns of the names of tensors that the library does not read either.
        vocabulary: the stored names of the embedding and the output.
    """

    matched: Matched
    ignored: Collection[str]

    @property
    def vocabulary(self) -> tuple[str, str]:
        """See the class."""

    def check_experts(
        self, shards: Sequence[RankShard], quantization: str, *, grouped_bytes: int, check: Callable[..., None]
    ) -> None:
        """Call `check` for each rank's experts, and check that one product of all can take them; see `check_model`."""

    def cut(self, own: RankShard) -> None:
        """Cut the model for a rank; PlacementError if the library's plan cannot be followed."""


def _of_library(name: str, origin: WeightSource) -> Any:  # noqa: ANN401 - as the record says
    """Import the code that a field of the library's record names."""
    model_type = origin.shape.model_type
    return imported(getattr(library_of(model_type), name), setting=f"model_type={model_type}")


def _match_library(origin: WeightSource, *, num_ranks: int = 1, whole: WholeParts = WholeParts.none) -> MatchedLibrary:
    found: MatchedLibrary = _of_library("match", origin)(origin, num_ranks=num_ranks, whole=whole)
    return found


def vocabulary_of(origin: WeightSource) -> tuple[str, str]:
    """Return the stored names of the embedding and of the output of a model; they are equal if these are tied."""
    if not is_llama_kind(origin.config):
        return _match_library(origin).vocabulary
    sources = match_lean(origin, WholeParts.none).sources
    return sources[EMBEDDING], sources[OUTPUT]


def with_modules(origin: Origin) -> Origin:
    """Return the source with the modules of its model listed in its shape.

    If no record of the model's family describes these, they are read from the model as transformers builds it; else the
    source is returned as it is.
    """
    if record_of(origin.shape.model_type).is_written:
        return origin
    found: Origin = _of_library("with_modules", origin)(origin)
    return found


def is_llama_kind(config: PretrainedConfig) -> bool:
    """Whether the lean decoder supports this model."""
    if not record_of(config.model_type).is_llama_kind or config.hidden_act != "silu":
        return False
    rope: dict[str, Any] = config.rope_parameters or {}
    return bool(rope.get("partial_rotary_factor", 1.0) == 1.0)


def check_model(
    origin: WeightSource,
    *,
    num_ranks: int,
    quantization: str = NO_QUANTIZATION,
    whole: WholeParts = WholeParts.none,
    compiles: bool = False,
    grouped_bytes: int = 0,
    num_stages: int = 1,
) -> None:
    """Raise every error that `load_model` would raise, without loading weights.

    `num_ranks` counts the ranks of each stage. `compiles` says that layers take compiled products where these fit, as
    on a CPU; `grouped_bytes` are the bytes of a number in products of all experts at once, as on a GPU, or 0.

    Raises:
        CheckpointError: tensors are missing or have another shape.
        ConfigError: the static cache cannot serve this model, or it cannot be quantized.
        PlacementError: the family is not supported, or cannot be split over these ranks in this precision.
    """
    whole = kept_whole(origin.shape, whole)
    shards = split_model(origin.shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    stage_layers(origin.shape, num_stages)
    library = None if is_llama_kind(origin.config) else _match_library(origin, num_ranks=num_ranks, whole=whole)
    matched = library.matched if library else match_lean(origin, whole)
    kept = matched.check_packed(quantization)
    names = matched.unread(library.ignored if library else ())
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
    if library:
        library.check_experts(shards, quantization, grouped_bytes=grouped_bytes, check=check)
    linears = {
        layer: weight
        for name, weight in matched.table.items()
        if weight.role is LINEAR and (layer := name.removesuffix(".weight")) not in kept
    }
    _check_quantizable(linears, shards, quantization, compiles=compiles, check=check)
    if library:
        library.cut(shards[0])


def _check_quantizable(
    linears: Mapping[str, Parameter],
    shards: Sequence[RankShard],
    quantization: str,
    *,
    compiles: bool,
    check: Callable[..., None],
) -> None:
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
        odd = [
            name
            for name, weight in linears.items()
            if block and any(size % block for size in sizes(weight, 0) | sizes(weight, 1))
        ]
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

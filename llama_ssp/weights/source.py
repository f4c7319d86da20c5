"""The interface of a weight source: files (`checkpoint.Checkpoint`), a recipe, a loaded model.

Also the tensors of a checkpoint, and of a safetensors file.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import CheckpointError

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

_FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Facts of a tensor before it is read."""

    dtype: torch.dtype | None  # None if weights cannot have it; of a packed tensor, its scales'.
    shape: tuple[int, ...]  # of the whole tensor, unpacked.
    storage: str | None = None  # the storage format of a packed one, which is read as `byte_rows`.
    group: int = 0  # of which a slice of its inputs has a multiple; 0 for any slice.


class Wanted(TypedDict, total=False):
    """The part of a tensor that is read, and its form."""

    dim: int | None  # the dimension that is cut; None for the whole tensor.
    parts: Sequence[range]  # what to keep of that dimension, in this order.
    dtype: torch.dtype | None  # None for the tensor's; has no effect on packed ones.
    device: torch.device | None  # None for the CPU.


class WeightSource(Protocol):
    """A model whose tensors can be read one by one, whole or in slices."""

    @property
    def folder(self) -> Path:
        """The folder of its tokenizer and generation config, for messages too."""

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of transformers."""

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""

    @property
    def context(self) -> int:
        """The maximum sequence length."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""

    @property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """All tensors by name."""

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """Return one of `tensors` or a slice of it, contiguous and not shared."""


class MadeSource(WeightSource, Protocol):
    """The source of made weights, which compute a small model in other sizes."""

    @property
    def small(self) -> WeightSource:
        """The small model."""

    def layers_of(self, small_layers: Sequence[int]) -> tuple[int, ...]:
        """The layers that have the inputs of these layers of the small model."""

    def of_head(self, small: WeightSource, shape: ModelShape, agreement: float) -> WeightSource:
        """The source of a head of these sizes that computes a small one; ConfigError for sizes that cannot."""


class TapSource(WeightSource, Protocol):
    """The source of a draft head, which reads hidden states of its target; `shape.is_head` tells it from a model's.

    Attributes:
        target: the source of the model that it drafts for.
        layers: the target's layers whose inputs it reads; L, their number, stands for the last layer's output after the
            final norm, and L + 1 for the output before it.
        lean_runner, library_runner: `module:class` of the head as our decoder, and on the library's modules.
        ties: whether its output can be its embedding.
        first_norms: the names of norms that its first layer alone has.
        places: where modules of its first layer stand that no other one has, by their names in its inventory.
    """

    target: WeightSource
    lean_runner: str
    library_runner: str
    ties: bool
    first_norms: Sequence[str]
    places: Mapping[str, str]

    @property
    def layers(self) -> tuple[int, ...]:
        """See the class."""

    def more_parameters(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of parameters besides its layers and vocabularies, by name."""

    def extend(self, model: "PreTrainedModel") -> None:
        """Add the modules that a model of its layers in the library lacks."""

    def updated(self, target: WeightSource | None, files: WeightSource | None) -> WeightSource | None:
        """The source with other weights of the target, or of its own files; None if it goes on with its own ones."""


def tap_source(origin: WeightSource) -> TapSource | None:
    """A source as that of a draft head; None for a model's."""
    return cast("TapSource", origin) if origin.shape.is_head else None


PACKED = attrgetter("storage")
"""Whether a tensor is packed; all packed tensors of a source have one storage format."""


def storage_of(origin: WeightSource) -> str | None:
    """The storage format of its packed tensors; None if it has none."""
    return next(filter(None, map(PACKED, origin.tensors.values())), None)


@dataclass(frozen=True, kw_only=True)
class ListedTensor(TensorFacts):
    """A tensor of a checkpoint."""

    @abstractmethod
    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """Copy the tensor or a slice of it out of its files, casting in the same copy; see `WeightSource.read`.

        CheckpointError if a file has changed since it was inspected.
        """


@dataclass(frozen=True, kw_only=True)
class StoredTensor(ListedTensor):
    """A tensor and its safetensors file."""

    file: Path
    name: str  # in the file.
    kind: str  # the file's word for its dtype, such as F16 or I32.
    number: int | None = None  # of the part of the first dimension that this is, as of an expert; None for all.

    def read(self, **wanted: Unpack[Wanted]) -> Tensor:
        """See `ListedTensor.read`."""
        dim = wanted.get("dim")
        if dim is None:
            piece = self.mapped()
        else:
            before = [range(size) for size in self.shape[:dim]]
            pieces = [self.mapped(*before, part) for part in wanted["parts"]]
            piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)
        # A copy, because it may be a view of the mapped file.
        dtype = wanted.get("dtype") or self.dtype or piece.dtype
        return piece.to(dtype, copy=True, memory_format=torch.contiguous_format).to(wanted.get("device"))

    def mapped(self, *parts: range) -> Tensor:
        """The tensor, or parts of its first dimensions, perhaps as a view of the file; CheckpointError as in `read`."""
        index: tuple[int | slice, ...] = () if self.number is None else (self.number,)
        index += tuple(slice(part.start, part.stop) for part in parts)
        try:
            with safe_open(self.file, framework="pt") as stored:
                piece: Tensor = stored.get_slice(self.name)[index] if index else stored.get_tensor(self.name)
                return piece
        except (SafetensorError, OSError) as error:
            raise _unreadable(self.file, error) from error


def read_small(tensors: Mapping[str, StoredTensor]) -> dict[str, list[int]]:
    """Read the numbers of small tensors by name; each file is opened once."""
    found = dict[str, list[int]]()
    for file in sorted({tensor.file for tensor in tensors.values()}):
        try:
            with safe_open(file, framework="pt") as stored:
                here = {name: tensor.name for name, tensor in tensors.items() if tensor.file == file}
                found |= {name: stored.get_tensor(in_file).tolist() for name, in_file in here.items()}
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """List a file's tensors; on opening, safetensors checks the header against the size of the file."""
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
            return {
                name: StoredTensor(
                    file=file,
                    name=name,
                    kind=(kind := piece.get_dtype()),
                    dtype=_FLOAT_DTYPES.get(kind),
                    shape=tuple(piece.get_shape()),
                )
                for name, piece in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or corrupt ({error}): copy or download it again")

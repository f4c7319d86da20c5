"""A tensor in a safetensors file, and what is said of a file that cannot be read."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.weights.source import TensorFacts

_FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class StoredTensor(TensorFacts):
    """A tensor and its safetensors file.

    Attributes:
        name: in the file.
        kind: the file's word for its dtype, such as F16 or I32.
    """

    file: Path
    name: str
    kind: str

    def read(self, *parts: range) -> Tensor:
        """Read the tensor, or parts of its first dimensions; the result may be a view of the mapped file.

        CheckpointError if the file has changed since it was inspected.
        """
        index = tuple(slice(part.start, part.stop) for part in parts)
        try:
            with safe_open(self.file, framework="pt") as stored:
                piece: Tensor = stored.get_slice(self.name)[index or slice(None)]
                return piece
        except (SafetensorError, OSError) as error:
            raise _unreadable(self.file, error) from error


def read_header(file: Path) -> dict[str, StoredTensor]:
    """List a file's tensors; on opening, safetensors checks the header against the size of the file."""
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
            return {
                name: StoredTensor(
                    file=file,
                    name=name,
                    kind=piece.get_dtype(),
                    dtype=_FLOAT_DTYPES.get(piece.get_dtype()),
                    shape=tuple(piece.get_shape()),
                )
                for name, piece in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or corrupt ({error}): copy or download it again")

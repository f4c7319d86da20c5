"""What a storage format is: one record of facts, which the planner, the checks and the loader read.

A format lives in one module of this package, whose `FORMAT` is its record. Code outside the package adds one with
`register`; `model.quantization=NAME` then works as with the formats here. Nothing here imports torch: a record names
its kernel as `module:Class`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_ssp.config import formats as package
from llama_ssp.config.registry import Registry, imported

NO_QUANTIZATION = "none"
"""The format that `model.quantization` has by default."""

MatrixBytes = Callable[[int, int], int]
"""Maps a matrix's number of weights, and the bytes of each unquantized one, to the bytes it takes."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that a kernel needs.

    Attributes:
        name: as it is imported.
        install: the command that installs it.
    """

    name: str
    install: str


def all_values(num_weights: int, value_bytes: int) -> int:
    """Bytes of a matrix that keeps its number format."""
    return num_weights * value_bytes


def no_row_bytes(value_bytes: int) -> int:  # noqa: ARG001 - the number format does not matter
    """Nothing is kept for each output."""
    return 0


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """Facts about one way to store linear layers.

    Attributes:
        name: what `model.quantization` is set to.
        order: where lists of formats show it, the smallest first.
        short_name: what narrow tables show; None for the name itself.
        kernel: `module:Class` of the form that holds a weight and multiplies by it, a `models.linear.Kernel`; None for
            a format that keeps the weights as they are.
        settings: fields of the model's entry that the kernel takes: the kernel's keyword by the field's name.
        matrix_bytes: bytes of a matrix, what is kept for each output left out; see `MatrixBytes`.
        row_bytes: bytes for each output; it takes the bytes of one value in the model's number format.
        unpacks_matrix: a product unpacks the whole matrix, so that a forward needs room for the largest one.
        gpu_read_bytes: what a product on a GPU costs, in bytes read; it takes the number of rows, and the bytes of the
            matrix in this format and unquantized.
        rounds_inputs: the kernel quantizes inputs too: what differs in the last bit may then end a whole step apart.
        group: how many inputs of an output share a scale; a layer's inputs are a multiple of it.
        package: what the kernel needs besides torch.
        one_gpu_per_rank: the kernel works on one GPU of a process alone.
        change_weight: how much of what was asked it takes away, for the planner's smallest change that makes a plan
            fit; None where the planner does not suggest the format.
        draft_advice, target_advice: what a plan for GPUs warns of; `{dtype}` stands for the number format.
    """

    name: str
    order: int = 100
    short_name: str | None = None
    kernel: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    matrix_bytes: MatrixBytes = all_values
    row_bytes: Callable[[int], int] = no_row_bytes
    unpacks_matrix: bool = False
    gpu_read_bytes: Callable[[int, int, int], float] = lambda rows, packed, unquantized: packed  # noqa: ARG005
    rounds_inputs: bool = False
    group: int = 1
    package: Package | None = None
    one_gpu_per_rank: bool = False
    change_weight: int | None = None
    draft_advice: str | None = None
    target_advice: str | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether weights are stored in another form than their number format."""
        return self.kernel is not None

    def load_kernel(self) -> Any:  # noqa: ANN401 - a class of a module that may import torch
        """Import the kernel's class; None where there is none."""
        return None if self.kernel is None else imported(self.kernel, setting=f"model.quantization={self.name}")


FORMATS: Registry[StorageFormat] = Registry(package.__name__, "FORMAT", setting="model.quantization")
register, formats, format_of, problem_of = FORMATS.register, FORMATS.all, FORMATS.of, FORMATS.problem_of


def takes(name: str, setting: str) -> bool:
    """Whether a format has a setting; one that does not exist has none."""
    found = formats().get(name)
    return found is not None and setting in found.settings

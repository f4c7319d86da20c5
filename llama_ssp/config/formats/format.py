"""Records of the storage formats (`config.registry`), which the planner, the checks and the loader read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_ssp.config import formats as package
from llama_ssp.config.registry import Registry, imported

NO_QUANTIZATION = "none"
"""Default of `model.quantization`."""

MatrixBytes = Callable[[int, int], int]
"""Maps the number of weights of a matrix, and the bytes of an unquantized weight, to the bytes of the matrix."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that a kernel imports, and the command that installs it."""

    name: str
    install: str


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """One way to store linear layers.

    Attributes:
        name: value of `model.quantization`.
        order: position in lists of formats.
        short_name: name in narrow tables; None uses `name`.
        kernel: `module:Class` of a `models.linear.Kernel`, which holds a weight and multiplies by it; None for
            unquantized weights.
        settings: the kernel's keyword arguments, by the field of the model entry that sets them.
        matrix_bytes: bytes of a matrix without what is kept per output; see `MatrixBytes`.
        row_bytes: bytes per output, from the bytes of one value in the model's number format.
        unpacks_matrix: a product unpacks the whole matrix, so a forward needs room for the largest one.
        gpu_unpacks: weights that a product of many rows unpacks at a time on a GPU.
        gpu_read_bytes: cost of a product on a GPU as bytes read, from the number of rows and the bytes of the matrix in
            this format and unquantized.
        fp32_on_cpus: the kernel for CPUs computes in fp32, so the other layers do too unless a number format is given.
        rounds_inputs: the kernel quantizes inputs too, so a difference in the last bit can become a whole step.
        group: number of inputs that share a scale; the inputs of a layer are a multiple of it.
        reads_packed: checkpoints whose weights are stored in this format are read as they are.
        package: what the kernel needs in addition to torch.
        one_gpu_per_rank: the kernel works with one GPU per process only.
        change_weight: what a user loses by this format, for the planner's changes that make a plan fit: 3 or less is
            little; None if the planner does not suggest it.
        draft_advice, target_advice: warnings of a plan for GPUs; `{dtype}` stands for the number format.
    """

    name: str
    order: int = 100
    short_name: str | None = None
    kernel: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    matrix_bytes: MatrixBytes = lambda num_weights, value_bytes: num_weights * value_bytes
    row_bytes: Callable[[int], int] = lambda value_bytes: 0  # noqa: ARG005
    unpacks_matrix: bool = False
    gpu_unpacks: int = 0
    gpu_read_bytes: Callable[[int, int, int], float] = lambda rows, packed, unquantized: packed  # noqa: ARG005
    fp32_on_cpus: bool = False
    rounds_inputs: bool = False
    group: int = 1
    reads_packed: bool = False
    package: Package | None = None
    one_gpu_per_rank: bool = False
    change_weight: int | None = None
    draft_advice: str | None = None
    target_advice: str | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether weights are not stored in the model's number format."""
        return self.kernel is not None

    def load_kernel(self) -> Any:  # noqa: ANN401 - a class of a module that may import torch
        """Import the kernel's class, if there is one."""
        return None if self.kernel is None else imported(self.kernel, setting=f"model.quantization={self.name}")


FORMATS: Registry[StorageFormat] = Registry(package.__name__, "FORMAT", setting="model.quantization")
register, formats, format_of, problem_of = FORMATS.register, FORMATS.all, FORMATS.of, FORMATS.problem_of


def takes(name: str, setting: str) -> bool:
    """Whether a format has a setting; False for an unknown format."""
    found = formats().get(name)
    return found is not None and setting in found.settings

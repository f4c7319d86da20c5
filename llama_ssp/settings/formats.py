"""Storage formats of linear layers, and formats of the cache: their records, which planner, checks and runs read."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from llama_ssp.settings.registry import Registry, imported

NO_QUANTIZATION = "none"  # Default of `model.quantization`.


class Package(NamedTuple):
    """A package, and the command that installs it."""

    name: str
    install: str


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """One way to store linear layers."""

    name: str  # value of `model.quantization`.
    order: int = 100  # position in lists of formats.
    short_name: str | None = None  # in narrow tables, where it is another one.
    # `module:name` of a `kernels.linear.Kernel`, which makes a layer of a weight and a bias; None for unquantized
    # weights.
    kernel: str | None = None
    weight_bytes: float | None = None  # of a weight; None for those of the model's number format.
    row_bytes: int = 0  # per output.
    word_bytes: int = 4  # of what a group of inputs shares: by default a scale in fp32.
    # numbers of inputs that may share a word, the largest first: a layer has the largest that its inputs consist of, or
    # that of its file. Its inputs are a multiple of the smallest.
    groups: tuple[int, ...] = ()
    loading_copies: int = 2  # times its bytes that a product takes while its kernel lays it out.
    unpacks_matrix: bool = False  # a product unpacks the whole matrix, so a forward needs room for the largest one.
    gpu_unpacks: int = 0  # weights that a product of many rows unpacks at a time on a GPU.
    # cost of a product on a GPU as bytes read, from the number of rows and the bytes of the matrix in this format and
    # unquantized.
    gpu_read_bytes: Callable[[int, int, int], float] = lambda rows, packed, unquantized: packed  # noqa: ARG005
    # the kernel for CPUs computes in fp32, so the other layers do too unless a number format is given.
    fp32_on_cpus: bool = False
    is_stored_alone: bool = False  # weights are not quantized to it: it is for checkpoints that are stored so.
    # the kernel quantizes inputs too, so a difference in the last bit can become a whole step.
    rounds_inputs: bool = False
    package: Package | None = None  # the package that the kernel needs, and the command that installs it.
    package_bytes: int = 0  # of a process on a CPU that imported the package.
    one_gpu_per_rank: bool = False  # the kernel works with one GPU per process only.
    # the loss for a user, among the planner's changes that make a plan fit: 3 or less is little; None if the planner
    # does not suggest it.
    change_weight: int | None = None
    # warning of a plan for GPUs about a draft in this format, with `{dtype}` in place of the number format.
    draft_advice: str | None = None
    target_advice: str | None = None  # the same about a target.

    def read_bytes(self, rows: int, packed: int, unquantized: int, *, device: str) -> float:
        """Cost of a product as bytes read; our kernels on CPUs read the packed matrix once, whatever the rows."""
        on_cpu = device == "cpu" and self.fp32_on_cpus
        return packed if on_cpu else self.gpu_read_bytes(rows, packed, unquantized)

    @cached_property
    def is_quantized(self) -> bool:
        """Whether weights are not stored in the model's number format."""
        return self.kernel is not None

    @property
    def least_group(self) -> int:
        """The inputs of a layer are a multiple of it."""
        return min(self.groups, default=1)

    def group_of(self, num_inputs: int) -> int:
        """The number of inputs that share a word in a layer with so many; 0 for all."""
        return next((group for group in self.groups if num_inputs % group == 0), min(self.groups, default=0))

    def matrix_bytes(self, num_weights: int, value_bytes: int, *, group: int = 0) -> int:
        """Bytes of a matrix without what is kept per output.

        Args:
            num_weights: of the matrix.
            value_bytes: of a number in the model's number format.
            group: inputs that share a word; 0 for the most.
        """
        if self.weight_bytes is None:
            return num_weights * value_bytes
        group = group or max(self.groups, default=0)
        return math.ceil(num_weights * self.weight_bytes) + (self.word_bytes * -(-num_weights // group) if group else 0)

    def load_kernel(self) -> Any:  # noqa: ANN401 - of a module that may import torch
        """Import the kernel, if there is one."""
        return None if self.kernel is None else imported(self.kernel, setting=f"model.quantization={self.name}")


FORMATS: Registry[StorageFormat] = Registry(setting="model.quantization")
register, formats, format_of, problem_of = FORMATS.register, FORMATS.all, FORMATS.of, FORMATS.problem_of

ROWS_OF_A_PASS = 32  # Rows that our kernel computes while it reads the weights once.
FEW_ROWS = 4 * ROWS_OF_A_PASS
"""Rows up to which it multiplies by the packed weights as they are; for more the matrix is unpacked.

Derived, not measured. Unpacking an int8 weight moves 5 bytes of memory: it reads 1, writes 2 and reads 2. Four passes
of the kernel move 4; each further one would move one more, and through the L2 cache two more of inputs.
"""
UNPACKED_WEIGHTS = 2**26
"""Weights that a GPU unpacks at a time, 128 MiB in 16 bits: a matrix of 65B in at most six steps."""
WORD_BYTES = 4  # Of an fp32 scale, which in int4 has the zero in its last bits.
ORDER_BYTES = 4  # Of an input, where the groups of files are scattered.
NF4_GROUP = 64  # Inputs that share a word.
INT4_GROUPS = 128, 64, 32  # The same; most public checkpoints have 128.
FP8_GROUP = 128  # The same; public checkpoints have blocks of 128 inputs, or none.
FP4_GROUP = 32  # The same.
INT4_ZERO_BITS = 31  # Those bits of a word that hold the zero.
FP4_NUMBERS = tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Of the codes of floats of 4 bits, E2M1."""
FP4_SCALED = {"mxfp4": 32, "nvfp4": 16}  # Inputs that share a scale of floats of 4 bits.
_INT8_SLOWDOWN = 4.0  # Relative to fp16 on GPUs: 3-5x as published, nearly constant from 1 to K + 1 rows.
_KERNELS = "llama_ssp.models.quantization.weight_only"
BITSANDBYTES = Package("bitsandbytes", ".venv/bin/python -m pip install -e '.[bitsandbytes]' -c .venv/constraints.txt")


READ_SLOWDOWN = {8: 1.2, 4: 1.6}
"""Time to read packed weights, by their bits, relative to a copy of as many bytes: fitted to published rows."""


def _few_rows_bytes(rows: int, packed: int, unquantized: int) -> float:
    """Our kernel reads the weights in every pass; beyond its rows the matrix is unpacked, written and read again.

    Those of less than a third of the unquantized bytes have 4 bits.
    """
    slowdown = READ_SLOWDOWN[4 if 3 * packed < unquantized else 8]
    return slowdown * packed * -(-rows // ROWS_OF_A_PASS) if rows <= FEW_ROWS else packed + 2 * unquantized


def _nf4_read_bytes(rows: int, packed: int, unquantized: int) -> float:
    """The kernel for one row is no faster than fp16; for more rows the matrix is unpacked, written and read again."""
    return unquantized if rows == 1 else packed + 2 * unquantized


register(StorageFormat(name=NO_QUANTIZATION, order=0))
register(  # LLM.int8(): a scale per output; inputs are quantized too. Source: Dettmers et al. 2022, arXiv:2208.07339
    StorageFormat(
        name="int8",
        order=1,
        kernel="llama_ssp.models.quantization.precision:int8_linear",
        weight_bytes=1,
        row_bytes=WORD_BYTES,
        fp32_on_cpus=True,
        gpu_read_bytes=lambda rows, packed, unquantized: _INT8_SLOWDOWN * unquantized,  # noqa: ARG005
        rounds_inputs=True,
        package=BITSANDBYTES,
        change_weight=3,
        draft_advice=(
            "an int8 draft through bitsandbytes cannot gain: it decodes 3-5x slower than {dtype} "
            "(published); use draft.model.quantization=none or int8_weight_only"
        ),
        target_advice=(
            "an int8 target through bitsandbytes saves memory, not time: it decodes 3-5x slower than {dtype} "
            "(published)"
        ),
    )
)
_NF4 = StorageFormat(  # NormalFloat: an fp32 scale per 64 weights. Source: Dettmers et al. 2023, arXiv:2305.14314
    name="nf4",
    order=2,
    kernel="llama_ssp.models.quantization.precision:Nf4Linear",
    weight_bytes=0.5,
    unpacks_matrix=True,
    gpu_read_bytes=_nf4_read_bytes,
    groups=(NF4_GROUP,),
    package=BITSANDBYTES,
    package_bytes=90_000_000,  # measured on a Xeon with bitsandbytes 0.50.2: 87 to 96 MB
    change_weight=5,
)
register(_NF4)
register(  # a float of 4 bits in place of it: for checkpoints that are stored so
    replace(_NF4, name="fp4", order=6, kernel="llama_ssp.models.quantization.precision:Fp4Linear", change_weight=None)
)
_WEIGHT_ONLY = StorageFormat(  # our own: one byte per weight, and an fp32 scale per output
    name="int8_weight_only",
    order=3,
    short_name="int8wo",
    kernel=f"{_KERNELS}:int8_weight_only_linear",
    weight_bytes=1,
    row_bytes=WORD_BYTES,
    fp32_on_cpus=True,
    gpu_read_bytes=_few_rows_bytes,
    gpu_unpacks=UNPACKED_WEIGHTS,
    one_gpu_per_rank=True,
    change_weight=3,
)
_INT4 = replace(  # half a byte per weight, and a word of 4 bytes per group
    _WEIGHT_ONLY, name="int4_weight_only", order=4, short_name="int4wo", kernel=f"{_KERNELS}:int4_weight_only_linear",
    weight_bytes=0.5, row_bytes=0, groups=INT4_GROUPS, change_weight=5, loading_copies=4,  # codes are bytes on the way
)  # fmt: skip
_INT8_GROUPS = replace(  # the same per group: for checkpoints that are stored so; every product unpacks it
    _INT4, name="int8_groups", order=9, short_name=None, kernel=f"{_KERNELS}:int8_groups_linear", weight_bytes=1,
    change_weight=None, is_stored_alone=True, gpu_read_bytes=lambda rows, packed, unquantized: packed + 2 * unquantized,  # noqa: ARG005
    fp32_on_cpus=False, loading_copies=2,
)  # fmt: skip
_FP8 = replace(  # E4M3, a float of 8 bits, and an fp32 scale per 128 weights: for checkpoints that are stored so
    _WEIGHT_ONLY, name="fp8_weight_only", order=5, short_name="fp8wo", kernel=f"{_KERNELS}:fp8_weight_only_linear",
    row_bytes=0, groups=(FP8_GROUP,), change_weight=None,
)  # fmt: skip
_MXFP4 = replace(  # E2M1, a float of 4 bits, a power of two per 32 weights in a byte, and a scale per output
    _FP8, name="mxfp4", order=7, short_name=None, kernel=f"{_KERNELS}:mxfp4_linear", weight_bytes=0.5,
    row_bytes=WORD_BYTES, word_bytes=1, groups=(FP4_GROUP,), is_stored_alone=True,
)  # fmt: skip
_NVFP4 = replace(  # E4M3 per 16 weights in its place
    _MXFP4, name="nvfp4", order=8, kernel=f"{_KERNELS}:nvfp4_linear", word_bytes=2,
)  # fmt: skip
for _each in (_WEIGHT_ONLY, _INT4, _INT8_GROUPS, _FP8, _MXFP4, _NVFP4):
    register(_each)


OWN_DTYPE = "auto"  # Default of `model.cache_dtype`.


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """One way to keep the D numbers of a key, or of a value, of one head."""

    name: str  # value of `model.cache_dtype`.
    order: int = 100  # position in lists of formats.
    dtype: str | None = None  # of a number, as torch names it; None for that of the model.
    number_bytes: int = 0  # of a number, with a dtype of its own.
    # what the largest number becomes; a scale in fp32 is kept behind the numbers. None keeps numbers as they are.
    largest: float | None = None

    def row_bytes(self, head_dim: int, *, value_bytes: int) -> int:
        """Bytes of a key, from D and the bytes of a number of the model."""
        numbers = head_dim * (self.number_bytes if self.dtype else value_bytes)
        return numbers + (WORD_BYTES if self.largest else 0)


CACHES: Registry[CacheFormat] = Registry(setting="model.cache_dtype")

CACHES.register(CacheFormat(name=OWN_DTYPE, order=0))
CACHES.register(CacheFormat(name="bf16", order=1, dtype="bfloat16", number_bytes=2))
CACHES.register(CacheFormat(name="fp16", order=2, dtype="float16", number_bytes=2))
CACHES.register(CacheFormat(name="int8", order=3, dtype="int8", number_bytes=1, largest=127.0))
CACHES.register(CacheFormat(name="fp8", order=4, dtype="float8_e4m3fn", number_bytes=1, largest=448.0))

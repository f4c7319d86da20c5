"""Storage formats of linear layers, and formats of the cache: records that planner, checks and runs read.

Extensions have the records of storage formats.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from llama_ssp.registry import Registry, imported

NO_QUANTIZATION = "none"  # Default of `model.quantization`.
NO_SLOWDOWN: Mapping[str, float] = MappingProxyType({})


class Package(NamedTuple):
    """A package, and the command that installs it."""

    name: str
    install: str
    process_bytes: int = 0  # of a process on a CPU that imported it.


class Product(NamedTuple):
    """Weights that a compiled product of a CPU reads; an extension writes one for each."""

    kind: str  # its name.
    codes: str  # how weights are stored, a name of its extension.
    needs: tuple[str, ...] = ()  # instructions of a CPU, by LLVM's names.
    group: int = 0  # the fewest inputs that share a word; 0 where all of an output do.
    scaled: int = 0  # inputs that share a scale, where a word consists of scales; else 0.
    scale_dtype: str = "float32"  # the number format of these scales, as torch names it.


Block: TypeAlias = tuple[int | None, int | None]
"""The numbers of outputs and of inputs that share a scale; None for all of them."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Layout of weights in a checkpoint that runs keep as they are; tensors by the last parts of their names."""

    name: str  # for tables.
    storage: str  # the storage format that they are read in.
    block: Block  # of a scale.
    group: int = 0  # inputs that share a word in our format, the largest that the blocks consist of; 0 for all.
    weight: str
    scale: str
    zero: str = ""  # may be absent.
    order: str = ""  # g_idx, which may be absent.
    others: tuple[str, ...] = ()  # tensors that are not needed.
    has_inputs_first: bool = False  # matrices are stored transposed.
    joins_outputs: bool = False  # a word has the codes of eight outputs, in AWQ's order, not of eight inputs.
    least_zero: int = 0  # what a stored zero of 0 stands for.
    is_scattered: bool = False  # any inputs may share a scale, as `order` says.
    steps: int = 1  # that a stored scale is divided into.
    factor: str = ""  # a scale of the matrix, which may be absent.
    divides: bool = False  # by that scale.
    joint: str = "."  # what precedes the last parts; none where a tensor has all experts.

    @property
    def slice_group(self) -> int:
        """A slice of the inputs is a multiple of this; 0 for any slice. A word of a file has the codes of eight."""
        return 8 if self.is_scattered else self.group

    def num_with_gaps(self, num_inputs: int, *, of: int) -> int:
        """Inputs that are kept for a part of scattered inputs `of` all: as many groups of 32 as it may need."""
        group = INT4_GROUPS[-1]
        return group * (num_inputs // group + of // (self.block[1] or of))

    @property
    def leaves(self) -> tuple[str, ...]:
        """Last parts of the names of all tensors of a layer that are no ordinary parameters."""
        return tuple(filter(None, (self.weight, self.scale, self.zero, self.order, self.factor, *self.others)))


Found: TypeAlias = PackedLayout | list[str]
"""A layout, or clauses that say why there is none."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The layout of weights in memory."""

    weight_bytes: float | None = None  # of a weight; None for the model's number format.
    row_bytes: int = 0  # per output.
    word_bytes: int = 4  # of what a group of inputs shares: by default a scale in fp32.
    # numbers of inputs that may share a word, the largest first: a layer has the largest that its inputs consist of, or
    # its file's. Its inputs are a multiple of the smallest.
    groups: tuple[int, ...] = ()

    @property
    def least_group(self) -> int:
        """The number whose multiples the inputs of a layer must be."""
        return min(self.groups, default=1)

    def group_of(self, num_inputs: int) -> int:
        """The number of inputs that share a word in a layer with `num_inputs`; 0 for all."""
        return next((group for group in self.groups if num_inputs % group == 0), min(self.groups, default=0))

    def matrix_bytes(self, num_weights: int, value_bytes: int, *, group: int = 0) -> int:
        """Bytes of a matrix without the bytes per output.

        `value_bytes` is the size of a number in the model's number format; `group` inputs share a word, 0 for the most.
        """
        if self.weight_bytes is None:
            return num_weights * value_bytes
        group = group or max(self.groups, default=0)
        return math.ceil(num_weights * self.weight_bytes) + (self.word_bytes * -(-num_weights // group) if group else 0)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of products and of loading, for plans."""

    # a product on a GPU as bytes read, from the number of rows, the bytes of the matrix in this format and unquantized,
    # and `slowdown` of the machine.
    gpu_read_bytes: Callable[[int, int, int, Mapping[str, float]], float] = lambda _rows, packed, *_: packed
    gpu_unpacks: int = 0  # weights that a product of many rows unpacks at a time on a GPU.
    unpacks_matrix: bool = False  # a product unpacks the whole matrix, so a forward needs room for the largest one.
    loading_copies: int = 2  # times its bytes that a product takes while its kernel lays it out.


@dataclass(frozen=True, kw_only=True)
class Files:
    """The quantized checkpoints that runs keep as they are."""

    # the layout in files that a `quantization_config` describes; None for layouts of other formats.
    layout: Callable[[Mapping[str, Any]], Found | None] | None = None
    reader: str | None = None  # `module:name` of a `weights.packed.PackedTensor`.
    reads: str = ""  # the layouts that it reads, for messages.
    counted_bits: int | None = None  # of weights that runs cannot read, which a plan counts in this format.
    stored_kind: str = ""  # files' word for the dtype of its weights, or of the scales of floats of 4 bits.


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """One way to store linear layers."""

    name: str  # value of `model.quantization`.
    order: int = 100  # position in lists of formats.
    short_name: str | None = None  # in narrow tables, where it is another one.
    # `module:name` of a `kernels.linear.Kernel`, which makes a layer of a weight and a bias; None for unquantized
    # weights.
    kernel: str | None = None
    packing: Packing = Packing()
    cost: Cost = Cost()
    files: Files = Files()
    compiled: Product | None = None  # the compiled product that a CPU may have.
    # the kernel for CPUs computes in fp32, so the other layers do too unless a number format is given.
    fp32_on_cpus: bool = False
    # the kernel quantizes inputs too, so a difference in the last bit can become a whole step.
    rounds_inputs: bool = False
    one_gpu_per_rank: bool = False  # the kernel works with one GPU per process only.
    package: Package | None = None  # that the kernel needs.
    is_stored_alone: bool = False  # weights are not quantized to it: it is for checkpoints that are stored so.
    has_published_times: bool = False  # ranges of forecasts follow published rows with it.
    # how much worse texts are in this format, for plans that suggest it where a model does not fit; up to 3 is little.
    # They never suggest a format with a smaller number than the model's own. None if they never suggest this one.
    change_weight: int | None = None
    # warning of a plan for GPUs about a draft in this format, with `{dtype}` in place of the number format.
    draft_advice: str | None = None
    target_advice: str | None = None  # the same about a target.

    def read_bytes(
        self, rows: int, packed: int, unquantized: int, *, device: str, slowdown: Mapping[str, float] = NO_SLOWDOWN
    ) -> float:
        """Cost of a product as bytes read; our kernels on CPUs read the packed matrix once, whatever the rows.

        `slowdown` has int8 and int4 where a machine reads packed weights otherwise than `READ_SLOWDOWN`.
        """
        if device == "cpu" and self.fp32_on_cpus:
            return packed
        return self.cost.gpu_read_bytes(rows, packed, unquantized, slowdown)

    @cached_property
    def is_quantized(self) -> bool:
        """Whether weights are not stored in the model's number format."""
        return self.kernel is not None

    @property
    def product(self) -> Product:
        """The compiled product of a format that has one."""
        assert self.compiled, f"{self.name} has no compiled product"
        return self.compiled

    def load(self, reference: str | None) -> Any:  # noqa: ANN401 - of a module that may import torch
        """Import the format's reader or kernel, if there is one."""
        return reference and imported(reference, setting=f"model.quantization={self.name}")


FORMATS: Registry[StorageFormat] = Registry(setting="model.quantization", modules=(__name__,), kind=StorageFormat)
register, formats, format_of, problem_of = FORMATS.register, FORMATS.all, FORMATS.of, FORMATS.problem_of
UNQUANTIZED = StorageFormat(name=NO_QUANTIZATION, order=0, has_published_times=True)  # in the model's number format


def counted_in(bits: object) -> str | None:
    """The storage format that stands for weights of `bits` bits; None if there is none."""
    return next((name for name, record in formats().items() if bits and record.files.counted_bits == bits), None)


def easiest_format() -> str:
    """The storage format that any layer can have, without a package."""
    found = (record for record in formats().values() if record.change_weight and not record.package)
    return next((record.name for record in found if not record.packing.groups), NO_QUANTIZATION)


ROWS_OF_A_PASS = 32  # Rows that our kernel computes while it reads the weights once.
FEW_ROWS = 4 * ROWS_OF_A_PASS
"""The most rows that our kernel multiplies by packed weights as they are; for more rows the matrix is unpacked.

Derived, not measured. Unpacking an int8 weight moves 5 bytes of memory: it reads 1, writes 2 and reads 2. Four passes
of the kernel move 4; each further one would move one more, and through the L2 cache two more of inputs.
"""
UNPACKED_WEIGHTS = 2**26
"""Weights that a GPU unpacks at a time, 128 MiB in 16 bits: a matrix of 65B in at most six steps."""
WORD_BYTES = 4  # Of an fp32 scale, which in int4 has the zero in its last bits.
ORDER_BYTES = 4  # Of an input, where the groups of files are scattered.
INT4_GROUPS = 128, 64, 32  # Inputs that share a word; most public checkpoints have 128.
FP8_GROUP = 128  # The same; public checkpoints have blocks of 128 inputs, or none.
FP4_GROUP = 32  # The same.
INT4_ZERO_BITS = 31  # The bits of a word that hold the zero.
FP4_NUMBERS = tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Values of the codes of floats of 4 bits, E2M1."""


READ_SLOWDOWN = {8: 1.2, 4: 1.6}
"""Time to read packed weights, by their bits, relative to a copy of as many bytes: fitted to published rows."""
ROW_SHARE = {8: 0.0206, 4: 0.0137}
"""Time of each further row, relative to a copy of the unquantized weights: 1 and 32 rows on an H200, of 12288 x 4096 in
int8 17 and 32 us, in int4 12 and 22 (docs/findings/gpus.md)."""


def few_rows_bytes(rows: int, packed: int, unquantized: int, slowdown: Mapping[str, float]) -> float:
    """Our kernel's time grows with the rows, until a matrix that is unpacked and read again takes no longer."""
    return min(all_rows_bytes(rows, packed, unquantized, slowdown), packed + 2 * unquantized)


def all_rows_bytes(rows: int, packed: int, unquantized: int, slowdown: Mapping[str, float] = NO_SLOWDOWN) -> float:
    """Cost of our kernel of a few rows for any number of them, as `reproducible=true` runs it, as bytes read.

    Packed weights of less than a third of the unquantized bytes have 4 bits. Weights in 16 bits have blocks of half as
    many outputs as in 8, all of which read each row, so that a row counts twice; the rows of a first tile are free.
    Derived, not measured beyond 128 rows.
    """
    if packed < unquantized:
        bits = 4 if 3 * packed < unquantized else 8
        times = slowdown.get(f"int{bits}", READ_SLOWDOWN[bits]) / READ_SLOWDOWN[bits]
        return times * (READ_SLOWDOWN[bits] * packed + ROW_SHARE[bits] * (rows - 1) * unquantized)
    return packed + 2 * ROW_SHARE[8] * max(rows - ROWS_OF_A_PASS, 0) * unquantized


OF_FEW_ROWS = Cost(gpu_read_bytes=few_rows_bytes, gpu_unpacks=UNPACKED_WEIGHTS)
"""The cost of our kernels for a few rows."""

OWN_DTYPE = "auto"  # Default of `model.cache_dtype`.


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """One way to keep the D numbers of a key, or of a value, of one head."""

    name: str  # value of `model.cache_dtype`.
    order: int = 100  # position in lists of formats.
    dtype: str | None = None  # of a number, as torch names it; None for the model's.
    number_bytes: int = 0  # of a number, with a dtype of its own.
    # what the largest number becomes; a scale in fp32 is kept after the numbers. None keeps numbers as they are.
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

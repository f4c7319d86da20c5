"""Tries Triton's kernels before their first use, and says what a run does where one does not work.

Triton compiles what launches its kernels with a C compiler and Python's headers. A machine without them, or a GPU that
Triton does not know, fails at the first call. `attempt` tries a kernel once; without it the run takes another way.

Shapes: M rows, I inputs, O outputs.
"""

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from llama_ssp.ranks.gpu import ends_run
from llama_ssp.storage.formats import FEW_ROWS

ProductOfFewRows = Callable[..., Tensor]
"""`linear_gpu.product_of_few_rows`."""

_Kernel = TypeVar("_Kernel")
_log = logging.getLogger(__name__)
_MOST_LETTERS = 200
_MEASURED = ("H200",)
"""Parts of the names of GPUs whose products in 16 bits were timed next to cuBLAS; see `docs/findings/gpus.md`."""
_SLOWER = {(10240, 5120), (49152, 576)}
"""Outputs and inputs of the only ones of 105 matrices for which cuBLAS was faster by more than 2 % at up to 5 rows."""
_NARROW, _MOST_ROWS = 4096, (8, 16)
"""Most outputs of a narrow product, and the most rows at which ours were faster, in general and for narrow ones."""
_HALVES = (torch.float16, torch.bfloat16)
TOLERANCE = 0.02
"""Share of the largest value: sums in another order, and one rounding more or less, differ by less."""
_said: set[str] = set()


def attempt(try_out: Callable[[], _Kernel], *, instead: str) -> _Kernel | None:
    """Call what tries a kernel and returns it; if that fails, warn once that the run goes on, and return None.

    `instead` says what the run does now; a clause.
    """
    try:
        return try_out()
    except Exception as error:  # compilers raise what they like
        if ends_run(error):
            raise
        if instead not in _said:
            _said.add(instead)
            _log.warning("%s: %s", instead, reason(error))
        return None


def check(name: str, found: Tensor, wanted: Tensor, *, tolerance: float = TOLERANCE) -> None:
    """RuntimeError, with the name of the kernel, if values differ by more than rounding; NaN does."""
    if bool((~((found - wanted).abs() <= tolerance * wanted.abs().max())).any()):
        raise RuntimeError(f"the kernel of the {name} is wrong on this device")


def reason(error: Exception) -> str:
    """Say what Triton lacks on this machine; if it lacks nothing, or is itself missing, the beginning of the error."""
    packages = missing_packages()
    if packages and not isinstance(error, ImportError):
        command = "dnf" if _is_red_hat() else "apt-get"
        return (
            "Triton needs a C compiler and Python.h, which this machine lacks; "
            f"sudo {command} install {' '.join(packages)} installs them"
        )
    cause = getattr(error, "inner_exception", error)  # torch's compiler wraps Triton's errors
    if isinstance(cause, subprocess.CalledProcessError):
        return f"{cause.cmd[0]} failed, and its own message stands above"
    return str(error).strip().partition("\n")[0][:_MOST_LETTERS] or type(error).__name__


def missing_packages() -> list[str]:
    """Name the system packages with what Triton needs and does not find: a C compiler, the headers of this Python."""
    packages = []
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        packages.append("gcc")
    # Of the schemes, the one in which Triton looks.
    if not (Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        packages.append(f"python{version}-{'devel' if _is_red_hat() else 'dev'}")
    return packages


def _is_red_hat() -> bool:
    return shutil.which("dnf") is not None


def find_few_rows(name: str, operands: Sequence[Tensor]) -> ProductOfFewRows | None:
    """The product of a few rows with the weights of a format, tried with small operands; None on a CPU.

    `operands` are a layer's, which the small ones resemble: weights with their outputs first, then scales or words, a
    row for each group of inputs. Without the product a warning says, once, what the format of this `name` costs.
    """
    weights_OI, *scales = operands
    if not weights_OI.is_cuda:
        return None
    num_inputs = weights_OI.shape[1] * _weights_of_a_byte(weights_OI.dtype)
    groups = tuple([num_inputs // len(part) if part.ndim > 1 else 0 for part in scales])
    return few_rows_of(name, tuple([part.dtype for part in operands]), groups)


@cache
def few_rows_of(name: str, dtypes: tuple[torch.dtype, ...], groups: tuple[int, ...]) -> ProductOfFewRows | None:
    """`find_few_rows` for operands of these dtypes; `groups` are the inputs per row of each scale or word, 0 for all.

    It is tried for one row and for the most, since these have tiles of their own, with inputs in fp16 and in bf16, if
    the GPU computes in that.
    """

    def tried() -> ProductOfFewRows:
        from llama_ssp.kernels.linear_gpu import product_of_few_rows  # noqa: PLC0415 - CPU builds come without Triton

        num_inputs, num_outputs = 256, 16
        ones = [torch.ones(num_outputs, num_inputs // _weights_of_a_byte(dtypes[0]))]
        ones += [torch.ones(num_inputs // group, num_outputs) if group else torch.ones(num_outputs) for group in groups]
        operands = [part.to(dtype).cuda() for part, dtype in zip(ones, dtypes, strict=True)]
        for dtype in _HALVES if torch.cuda.is_bf16_supported(False) else _HALVES[:1]:
            for num_rows in (1, FEW_ROWS):
                product_of_few_rows(torch.ones(num_rows, num_inputs, dtype=dtype).cuda(), *operands)
        return product_of_few_rows

    return attempt(tried, instead=f"{name} unpacks its weights in every forward, which is slower than fp16")


def _weights_of_a_byte(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.uint8 else 1


def find_halves(weight_OI: Tensor) -> tuple[ProductOfFewRows, int] | None:
    """Our product for a matrix in fp16 or bf16, and the most rows for which cuBLAS's is slower; None if it never is."""
    if not weight_OI.is_cuda or weight_OI.dtype not in _HALVES or torch.version.hip:
        return None
    name, shape = torch.cuda.get_device_name(weight_OI.device), tuple(weight_OI.shape)
    if shape in _SLOWER or not any(part in name for part in _MEASURED):
        return None
    product = _halves_of(weight_OI.dtype)
    return (product, _MOST_ROWS[shape[0] <= _NARROW]) if product else None


@cache
def _halves_of(dtype: torch.dtype) -> ProductOfFewRows | None:
    def tried() -> ProductOfFewRows:
        from llama_ssp.kernels.halves_gpu import product_of_halves  # noqa: PLC0415 - CPU builds come without Triton

        weight_OI = torch.linspace(-1, 1, 33 * 1104).view(33, 1104).sin().to(dtype).cuda()
        for num_rows in (1, 8, 16):
            x_MI = torch.linspace(0, 9, num_rows * 1104).view(num_rows, 1104).cos().to(dtype).cuda()
            check("product of a few rows", product_of_halves(x_MI, weight_OI), x_MI @ weight_OI.t())
        return product_of_halves

    return attempt(tried, instead="continuing with cuBLAS for few rows")

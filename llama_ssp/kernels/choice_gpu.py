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
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from llama_ssp.ranks.gpu import ends_run
from llama_ssp.storage.formats import FEW_ROWS, FP4_SCALED, INT4_GROUPS
from llama_ssp.weights.fp4_rows import SCALES

ProductOfFewRows = Callable[..., Tensor]
"""`linear_gpu.product_of_few_rows`."""

_Kernel = TypeVar("_Kernel")
_log = logging.getLogger(__name__)
_MOST_LETTERS = 200
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


def reason(error: Exception) -> str:
    """Say what Triton lacks on this machine; if it lacks nothing, or is itself missing, the beginning of the error."""
    packages = missing_packages()
    if packages and not isinstance(error, ImportError):
        command = "dnf" if _is_red_hat() else "apt-get"
        return (
            "Triton needs a C compiler and Python.h, which this machine lacks; "
            f"sudo {command} install {' '.join(packages)} installs them"
        )
    cause = getattr(error, "inner_exception", error)  # torch's compiler wraps those of Triton
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


@cache
def find_few_rows(name: str, device: str, *, group: int = INT4_GROUPS[0]) -> ProductOfFewRows | None:
    """The product of a few rows with the weights of a format, tried with small operands; None on a CPU.

    In int4 a word has `group` inputs.

    It is tried for one row and for the most, since these have tiles of their own, with inputs in fp16 and in bf16, if
    the GPU computes in that.
    Without it a warning says, once, what the format of this `name` costs.
    """
    if device != "cuda":
        return None
    samples = {
        "int8_weight_only": (torch.ones(16, 256, dtype=torch.int8), torch.ones(16)),
        "fp8_weight_only": (torch.zeros(16, 256, dtype=torch.float8_e4m3fn), torch.ones(2, 16)),
        "int4_weight_only": (
            torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(256 // group, 16, dtype=torch.int32)
        ),
        **{
            kind: (
                torch.zeros(16, 128, dtype=torch.uint8), torch.ones(256 // size, 16).to(SCALES[kind]), torch.ones(16)
            ) for kind, size in FP4_SCALED.items()
        },
    }  # fmt: skip
    instead = f"{name} unpacks its weights in every forward, which is slower than fp16"
    return attempt(partial(_tried_few_rows, samples[name]), instead=instead)


def _tried_few_rows(operands: tuple[Tensor, ...]) -> ProductOfFewRows:
    from llama_ssp.kernels.linear_gpu import product_of_few_rows  # noqa: PLC0415 - CPU builds come without Triton

    operands = tuple(operand.cuda() for operand in operands)
    halves = (torch.float16, torch.bfloat16) if torch.cuda.is_bf16_supported(False) else (torch.float16,)
    for dtype in halves:
        for num_rows in (1, FEW_ROWS):
            product_of_few_rows(torch.ones(num_rows, 256, dtype=dtype).cuda(), *operands)
    return product_of_few_rows

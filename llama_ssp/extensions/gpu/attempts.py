"""Tries Triton's kernels before their first use, and says what a run does where one does not work.

Triton compiles what launches its kernels with a C compiler and Python's headers. A machine without them, or a GPU that
Triton does not know, fails at the first call. `attempt` tries a kernel once; without it the run takes another way.
"""

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from llama_ssp.ranks.gpu import ends_run

_Kernel = TypeVar("_Kernel")
_log = logging.getLogger(__name__)
_MOST_LETTERS = 200
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


def is_current(device: torch.device) -> bool:
    """Whether Triton launches its kernels on this device: on the process's current one, wherever their tensors are."""
    return device.type != "cuda" or device.index in {None, torch.cuda.current_device()}


def check(name: str, found: Tensor, wanted: Tensor, *, tolerance: float = TOLERANCE) -> None:
    """Raise RuntimeError, with the name of the kernel, if values differ by more than rounding, or are NaN."""
    if bool((~((found - wanted).abs() <= tolerance * wanted.abs().max())).any()):
        raise RuntimeError(f"the kernel of the {name} is wrong on this device")


def reason(error: Exception) -> str:
    """Say what Triton lacks on this machine; if it lacks nothing or is not installed, the beginning of the error."""
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

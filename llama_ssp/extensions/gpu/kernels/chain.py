"""Programmatic dependent launch in Triton: a kernel starts while the one before it ends.

    between products    | weights | release, wait | all else                      |
    product                                | first weights | wait | sums | release | results |

A kernel that is launched with the options of `chained` calls `wait` in each program before it reads what another
kernel writes; `wait` returns when all earlier kernels have ended. The next kernel may start when all programs have
called `release`. In an ordinary launch both functions do nothing. No kernel writes weights, so a kernel may read them
before `wait`.

Source: CUDA's programming guide, programmatic dependent launch and synchronization.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until what other kernels have written can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def release(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def chained(device: torch.device) -> dict[str, bool]:
    """The options of a launch on a device; there is nothing to chain on CPUs, AMD's and older GPUs."""
    is_known = device.type == "cuda" and torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    pdl = is_known and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}

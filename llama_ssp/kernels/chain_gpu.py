"""Programmatic dependent launch in Triton: a kernel starts while the one before it ends.

    kernel      | release | loads of weights | wait | all else |
    the next              | release | loads of weights         | wait | all else |

A kernel that is launched with the options of `chained` calls `chain` in each program, before it reads what another
kernel writes: the next kernel may start when all programs have, and the wait ends when those before are done. Weights
may be read before. Launched alone, the two instructions do nothing.

Source: CUDA's programming guide, programmatic dependent launch and synchronization.
"""

from functools import cache

import torch
import triton
import triton.language as tl

FIRST_CAPABILITY = 9


@triton.jit
def chain(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start, and wait for those before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def chained(device: torch.device) -> dict[str, bool]:
    """The options of a launch on a device; there is nothing to chain on CPUs, AMD's and older GPUs."""
    is_known = device.type == "cuda" and torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    pdl = is_known and torch.cuda.get_device_capability(device)[0] >= FIRST_CAPABILITY
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}

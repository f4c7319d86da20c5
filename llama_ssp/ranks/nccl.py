"""NCCL's own words when it fails, and the usual remedy of each kind of failure.

The reason is the last line of torch's DistBackendError, whose first lines say only "unhandled system error".
"""

import re

import torch.distributed as dist

_REMEDIES = {
    r"/dev/shm|shared memory": "a container needs more shared memory: docker run --shm-size=8g, or --ipc=host",
    r"out of memory|cuda failure 2\b": "end other programs on the GPU, which nvidia-smi lists",
    r"duplicate gpu": "start one rank for each GPU",
    r"version|mismatch|truncated": "install the same torch and NCCL on every node",
    r"interface|bootstrap|connect|route|socket|network|remote|peer|ibv_":
        "NCCL_SOCKET_IFNAME=NAME names the interface that all nodes share",
}  # fmt: skip
"""Patterns of NCCL's last line, and what usually helps; the first that is found counts."""


def is_of_nccl(error: BaseException) -> bool:
    """Whether NCCL raised an error, at its start or in a collective."""
    return isinstance(error, dist.DistBackendError) and "nccl" in str(error).lower()


def explained(error: BaseException) -> str:
    """Return NCCL's own last line with its usual remedy."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()][-1].removeprefix("Last error:").strip()
    remedies = [remedy for words, remedy in _REMEDIES.items() if re.search(words, said.lower())]
    return "; ".join([f"NCCL: {said.rstrip('.')}", *remedies[:1], "NCCL_DEBUG=INFO in the environment shows more"])

"""Chooses whether our kernel, after a check, or NCCL sums small tensors over the GPUs of a node.

Either all ranks of a group use the kernel, or none. It needs GPUs of one node that map each other's memory by CUDA's
inter-process handles, and Triton; AMD's GPUs keep their library's sums.

Shapes: M rows, E width, R ranks.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from llama_ssp.architectures.engine import OWN_SUM_RANKS
from llama_ssp.extensions.gpu.attempts import reason
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.gpu import ends_run

if TYPE_CHECKING:
    from llama_ssp.extensions.gpu.kernels.sums import PeerSums

_PATIENCE = 2**25  # looks at a flag, about half a minute: the other ranks may still compile
_HANDLE_BYTES = 64
_MAPS_PEERS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class CudaMemory:
    """Memory of the current GPU that other processes map, by CUDA's own runtime.

    Torch would map another GPU's memory as that of a device of this process. Raises RuntimeError if a call fails.
    """

    def __init__(self) -> None:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        found = [line.split()[-1] for line in lines if "libcudart.so" in line]
        if not found:
            raise RuntimeError("torch has no library libcudart.so here")
        self._library = ctypes.CDLL(found[0])

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} failed with code {code}")

    def make(self, num_bytes: int) -> tuple[int, bytes]:
        """Allocate zeroed memory; returns its address and a handle for other processes."""
        address, handle = ctypes.c_void_p(), (ctypes.c_char * _HANDLE_BYTES)()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cudaMemset", address, 0, ctypes.c_size_t(num_bytes))
        self._call("cudaDeviceSynchronize")
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return address.value or 0, bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's memory; returns its address in this process."""
        address, given = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_MAPS_PEERS))
        return address.value or 0


class _Handle(ctypes.Structure):
    """A cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _UnusableError(Exception):
    """Why a rank cannot use the kernel, as all ranks know; a lost rank is another error."""


# By members, made once for all points of a sweep.
_found: dict[tuple[int, ...], "PeerSums | None"] = {}


def find_sums(comm: Comm) -> "PeerSums | None":
    """The kernel for a group, where it is right; all its ranks must call this together."""
    if comm.members not in _found:
        _found[comm.members] = find_peer_sums(comm, CudaMemory)
    return _found[comm.members]


def find_peer_sums(comm: Comm, open_device: Callable[[], CudaMemory]) -> "PeerSums | None":
    """The kernel over memory that all ranks of a group have mapped, if it is right on all of them.

    All ranks of the group must call this together. Otherwise the first rank warns, with the reason of one of them.
    """
    try:
        sums = _mapped(comm, open_device)
        _on_all(comm, partial(check_sums, replace(sums, patience=_PATIENCE), comm))
    except _UnusableError as error:
        if comm.rank == 0:
            _log.warning("continuing with NCCL's sums: %s", error)
        return None
    return sums


def _mapped(comm: Comm, open_device: Callable[[], CudaMemory]) -> "PeerSums":
    """Map the memories of all ranks; _UnusableError on every rank if one cannot."""

    def make() -> tuple[Any, CudaMemory, int, str]:
        from llama_ssp.extensions.gpu.kernels import sums as kernels

        device = open_device()
        if comm.size > OWN_SUM_RANKS:
            raise RuntimeError(f"it sums over {OWN_SUM_RANKS} ranks at most")
        address, handle = device.make(kernels.MEMORY_BYTES)
        return kernels, device, address, handle.hex()

    kernels, device, own, handle = _on_all(comm, make)
    said = [text.split() for text in comm.gather_text(f"{_node()} {handle}")]

    def open_all() -> list[int]:
        if len({node for node, _ in said}) > 1:
            raise RuntimeError("the ranks are on several nodes")
        return [own if rank == comm.rank else device.open(bytes.fromhex(text)) for rank, (_, text) in enumerate(said)]

    memories_R = torch.tensor(_on_all(comm, open_all), device=comm.device)
    counts = torch.zeros(kernels.NUM_SLOTS, dtype=torch.int32, device=comm.device)
    sums: PeerSums = kernels.PeerSums(rank=comm.rank, memories_R=memories_R, counts=counts)
    return sums


def _on_all(comm: Comm, step: Callable[[], _Result]) -> _Result:
    """Take a step on all ranks; _UnusableError on every rank, with a reason, if it fails on one."""
    found, fault = [], ""
    try:
        found.append(step())
    except Exception as error:  # of compilers and drivers
        if ends_run(error):
            raise
        fault = f"rank {comm.rank}: {reason(error)}"
    faults = [text for text in comm.gather_text(fault) if text]
    if faults:
        raise _UnusableError(faults[0])
    return found[0]


def _node() -> str:
    """A name of this machine, the same in all its containers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return "unknown"


@torch.inference_mode()
def check_sums(
    sums: "PeerSums",
    comm: Comm,
    shapes: Sequence[tuple[int, int]] = ((1, 4096), (5, 1000), (3, 7)),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16),
) -> None:
    """Raise RuntimeError unless sums of all shapes and formats, with and without norm, have the bits of rank order."""
    from llama_ssp.extensions.gpu.kernels.between import add_norm

    generator = torch.Generator().manual_seed(0)  # the same parts on all ranks
    for dtype in dtypes:
        for num_rows, width in shapes:
            parts_RME, x_1ME = (
                torch.randn(number, num_rows, width, generator=generator).to(comm.device, dtype)
                for number in (comm.size, 1)
            )
            total_ME = torch.zeros_like(x_1ME[0], dtype=torch.float32)
            for part_ME in parts_RME:
                total_ME += part_ME.float()
            wanted_ME, own_ME, x_ME, weight_E = total_ME.to(dtype), parts_RME[comm.rank], x_1ME[0], x_1ME[0, 0].clone()
            alone_ME = sums.all_reduce(own_ME.clone())
            added_ME = x_ME.clone()
            normed_ME = sums.add_norm(own_ME.clone(), added_ME, weight_E, 1e-2)
            wanted_normed_ME = add_norm(x_ME, wanted_ME, weight_E, 1e-2)
            pairs = ((alone_ME, wanted_ME), (added_ME, x_ME), (normed_ME, wanted_normed_ME))
            comm.finish()
            if not all(torch.equal(found, wanted) for found, wanted in pairs):
                raise RuntimeError(f"the kernel gives wrong sums of {num_rows} x {width} values in {dtype}")

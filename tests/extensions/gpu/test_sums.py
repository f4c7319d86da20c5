"""Sums of our own over the GPUs of a node: values in Triton's interpreter, what ptxas makes of them, who takes them."""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

import pytest
import torch

from llama_ssp.extensions.gpu import sums
from llama_ssp.extensions.gpu.sums import CudaMemory, find_peer_sums
from llama_ssp.ranks.comms import Comm
from tests.extensions.gpu.ahead_of_time import CAPABILITIES, compile_kernel
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import grid, slow

if TYPE_CHECKING:
    from llama_ssp.extensions.gpu.kernels.sums import PeerSums

pytestmark = pytest.mark.triton
pytest.importorskip("triton")
sums_gpu = import_module("llama_ssp.extensions.gpu.kernels.sums")


@pytest.mark.parametrize("sizes", ["few 2 3", slow("few 4 5 6 7 8"), slow("many 2")])
def test_all_ranks_get_the_bits_of_a_sum_in_their_order_alone_and_with_residual_and_norm(sizes: str) -> None:
    """Ranks are processes; formats, shapes, halves and counts that wrap around are in the helper."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.extensions.gpu.interpreted_sums", *sizes.split()],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@grid(capability=CAPABILITIES, dtype=["fp32", "fp16", "bf16"], has_norm=[False, True])
def test_the_kernel_needs_no_stack_and_orders_flags_for_the_whole_system(
    capability: int, dtype: str, *, has_norm: bool
) -> None:
    pointers = ("values", "residual", "weight", "normed") if has_norm else ("values",)
    types = dict.fromkeys(pointers, f"*{dtype}") | {"memories": "*i64", "counts": "*i32"}
    types |= {"eps": "fp32", "patience": "i64"}
    constants: dict[str, object] = {
        "RANK": 1,
        "SIZE": 3,
        "RANKS": 4,
        "PLACES": 8192 if has_norm else 1024,
        "NUM_SLOTS": sums_gpu.NUM_SLOTS,
        "SLOT_BYTES": sums_gpu.SLOT_BYTES,
    }
    constants |= dict.fromkeys({"residual", "weight", "normed"} - {*pointers})
    found = compile_kernel(
        sums_gpu.sum_kernel,
        types,
        constants,
        capability=capability,
        num_warps=8 if has_norm else 4,
        uneven=["patience"],
    )
    assert found.sass.count("MEMBAR.ALL.SYS") == 1, "one wait for what is written, whatever the number of ranks"
    assert found.sass.count("ATOMG.E.EXCH.STRONG.SYS") == found.sass.count("ATOMG.E.ADD.STRONG.SYS") == 1
    assert "LDG.E.128.STRONG.GPU" in found.sass, "parts of other ranks are read in the longest words"


class OneProcess(CudaMemory):
    """Memory that other ranks map, in one process."""

    def __init__(self, fault: str, rank: int) -> None:
        self.fault = fault if rank == 1 else ""

    def make(self, num_bytes: int) -> tuple[int, bytes]:
        """Memory, or the fault of a driver."""
        if self.fault == "make":
            raise RuntimeError("cudaMalloc failed with code 2")
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return self.memory.data_ptr(), self.memory.data_ptr().to_bytes(8)

    def open(self, handle: bytes) -> int:
        """The same memory."""
        if self.fault == "open":
            raise RuntimeError("cudaIpcOpenMemHandle failed with code 217")
        return int.from_bytes(handle)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", None),
        ("make", "rank 1: cudaMalloc failed with code 2"),
        ("open", "rank 1: cudaIpcOpenMemHandle failed with code 217"),
        ("node", "rank 0: the ranks are on several nodes"),
        ("check", "rank 1: the kernel gives wrong sums"),
    ],
)
def test_all_ranks_take_the_kernel_or_none_with_the_reason_of_one(
    fault: str, said: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = iter("abc")
    monkeypatch.setattr(sums, "_node", lambda: next(nodes) if fault == "node" else "a")
    devices: dict[int, OneProcess] = {}

    def check(found: "PeerSums", comm: Comm) -> None:
        assert found.patience < sums_gpu.ENDLESS, "a rank that is not there must not keep the others waiting"
        if fault == "check" and comm.rank == 1:
            raise RuntimeError("the kernel gives wrong sums")

    monkeypatch.setattr(sums, "check_sums", check)

    def one_rank(comm: ThreadComm) -> "PeerSums | None":
        return find_peer_sums(comm, lambda: devices.setdefault(comm.rank, OneProcess(fault, comm.rank)))

    found = on_ranks(thread_comms(3), one_rank)
    warnings = [record.getMessage() for record in caplog.records]
    if said:
        assert found == [None] * 3
        assert warnings == [f"continuing with NCCL's sums: {said}"]
        return
    assert not warnings
    memories = [devices[rank].memory.data_ptr() for rank in range(3)]
    for rank, own in enumerate(found):
        assert own
        assert own.memories_R.tolist() == memories
        assert own.rank == rank
        assert own.patience == sums_gpu.ENDLESS


@dataclass(frozen=True, kw_only=True)
class LostComm(ThreadComm):
    """Its other rank is lost as soon as the memories are mapped."""

    left: list[str] = field(default_factory=lambda: ["makes", "opens", "maps"])

    def gather_text(self, text: str) -> list[str]:
        """Gather, and then raise what gloo raises."""
        if not self.left:
            raise RuntimeError("Connection closed by peer")
        self.left.pop()
        return [text, text]


def test_a_lost_rank_ends_the_run_and_is_no_reason_for_nccls_sums(caplog: pytest.LogCaptureFixture) -> None:
    comm, *_ = thread_comms(2)
    lost = LostComm(rank=0, size=2, meeting=comm.meeting, table=comm.table, mail=comm.mail)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        find_peer_sums(lost, lambda: OneProcess("", 0))
    assert not caplog.records


RUNTIME = """
#include <stdlib.h>
#include <string.h>
typedef struct { char bytes[64]; } Handle;
int cudaMalloc(void **found, size_t size) { *found = size > 1000 ? 0 : malloc(size); return *found ? 0 : 2; }
int cudaMemset(void *at, int value, size_t size) { memset(at, value, size); return 0; }
int cudaDeviceSynchronize() { return 0; }
int cudaIpcGetMemHandle(Handle *made, void *at) { memset(made, 7, 64); memcpy(made, &at, 8); return 0; }
int cudaIpcOpenMemHandle(void **found, Handle given, unsigned flags) {
  memcpy(found, given.bytes, 8);
  return flags == 1 && given.bytes[63] == 7 ? 0 : 217;
}
"""


@pytest.mark.skipif(torch.cuda.is_available() or not which("cc"), reason="a runtime of CUDA, or no C compiler")
def test_memory_is_made_and_mapped_by_cudas_runtime(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no library libcudart"):
        CudaMemory()
    library = tmp_path / "libcudart.so.13"
    subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", library], input=RUNTIME, text=True, check=True)
    ctypes.CDLL(str(library))
    memory = CudaMemory()
    address, handle = memory.make(100)
    assert len(handle) == 64
    assert bytes((ctypes.c_char * 100).from_address(address)) == bytes(100)
    assert memory.open(handle) == address
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle failed with code 217"):
        memory.open(handle[:63] + b"x")
    with pytest.raises(RuntimeError, match="cudaMalloc failed with code 2"):
        memory.make(2000)


@pytest.mark.parametrize(
    ("values", "takes", "takes_rows"),
    [
        (torch.zeros(5, 6656, dtype=torch.float16), True, True),
        (torch.zeros(64, 2048, dtype=torch.bfloat16), True, True),
        (torch.zeros(65, 2048, dtype=torch.bfloat16), False, False),
        (torch.zeros(1, 8192), True, True),
        (torch.zeros(1, 16384), True, False),
        (torch.zeros(4, 100)[:, :50], True, True),
        (torch.zeros(4, 100, dtype=torch.int64), False, False),
        (torch.zeros(0, 100), False, False),
    ],
)
def test_the_kernel_takes_small_sums_of_whole_tensors(values: torch.Tensor, *, takes: bool, takes_rows: bool) -> None:
    own = sums_gpu.PeerSums(rank=0, memories_R=torch.zeros(2), counts=torch.zeros(1))
    assert (own.takes(values), own.takes_rows(values)) == (takes, takes_rows)

"""Sums over ranks in Triton's interpreter: every rank is a process, all of them map the same memory.

`TRITON_INTERPRET=1 python -m tests.extensions.gpu.interpreted_sums few 2 3` fails unless all ranks of 2 and of 3 get
the right bits for a few shapes.
"""

import mmap
import os
import sys
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from llama_ssp.extensions.gpu.kernels import sums as sums_gpu
from llama_ssp.extensions.gpu.sums import check_sums
from tests.extensions.gpu.interpreter import quicken

EPS = 1e-2
FIRST_COUNT = 2**31 - 4
FEW, MANY = ((3, 37), (1, 1030), (6, 10)), ((64, 32), (1, 7), (5, 4100), (1, 8192), (2, 1024))
"""Rows and widths; the slots that a sum uses, and the values in them, change from one to the next."""


def check_rank(rank: int, memories_R: Tensor, shapes: Sequence[tuple[int, int]]) -> None:
    """Make every sum alone, and with residual and norm; counts begin shortly before they wrap around."""
    counts = torch.full((sums_gpu.NUM_SLOTS,), FIRST_COUNT, dtype=torch.int32)
    sums, size = sums_gpu.PeerSums(rank=rank, memories_R=memories_R, counts=counts), len(memories_R)
    comm: Any = SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"), finish=lambda: None)
    check_sums(sums, comm, shapes, (torch.float32, torch.float16))
    generator = torch.Generator().manual_seed(size)
    for num_rows, width in shapes:  # bf16, which the interpreter cuts off rather than rounds: in whole numbers
        parts_RME, x_ME, weight_E = (
            torch.randint(-8, 9, sizes, generator=generator).bfloat16()
            for sizes in ((size, num_rows, width), (num_rows, width), (width,))
        )
        sum_ME, part_ME = parts_RME.float().sum(0), parts_RME[rank].clone()
        strided_ME = torch.stack([part_ME, part_ME], -1)[..., 0]
        assert torch.equal(sums.all_reduce(strided_ME).float(), sum_ME), (rank, x_ME.shape)
        added_ME = x_ME.float() + sum_ME
        normed_ME = sums.add_norm(part_ME, x_ME, weight_E, EPS)
        assert torch.equal(x_ME.float(), added_ME), (rank, x_ME.shape)
        exact_ME = functional.rms_norm(added_ME, weight_E.shape, weight_E.float(), EPS)
        assert_close(normed_ME.float(), exact_ME, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6)


def check(size: int, shapes: Sequence[tuple[int, int]]) -> None:
    memories = [mmap.mmap(-1, sums_gpu.MEMORY_BYTES) for _ in range(size)]  # shared with the processes made below
    tensors = [torch.frombuffer(memory, dtype=torch.int32) for memory in memories]
    for tensor in tensors:  # as after so many sums
        tensor[sums_gpu.FLAGS_AT // 4 :] = FIRST_COUNT
    memories_R = torch.tensor([tensor.data_ptr() for tensor in tensors])
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            try:
                check_rank(rank, memories_R, shapes)
            except BaseException:  # noqa: BLE001 - a rank that raises would keep the others waiting
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children]
    assert not any(codes), codes


def check_patience() -> None:
    """A rank that waits in vain gives NaN in the end."""
    memories = [torch.zeros(sums_gpu.MEMORY_BYTES, dtype=torch.uint8) for _ in range(2)]
    memories_R = torch.tensor([memory.data_ptr() for memory in memories])
    counts = torch.zeros(sums_gpu.NUM_SLOTS, dtype=torch.int32)
    sums = sums_gpu.PeerSums(rank=1, memories_R=memories_R, counts=counts, patience=3)
    assert sums.all_reduce(torch.ones(5)).isnan().all()


if __name__ == "__main__":
    torch.set_num_threads(1)
    quicken()
    check_patience()
    for number in map(int, sys.argv[2:]):
        check(number, {"few": FEW, "many": MANY}[sys.argv[1]])

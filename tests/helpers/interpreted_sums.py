"""Sums over ranks in Triton's interpreter: every rank is a process, all of them map the same memory.

`TRITON_INTERPRET=1 python -m tests.helpers.interpreted_sums few 2 3` fails unless all ranks of 2 and of 3 get the right
bits for a few shapes.
"""

import mmap
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from llama_ssp.kernels import between_gpu, sums_gpu

EPS, BF16 = 1e-2, torch.bfloat16
FIRST_COUNT = 2**31 - 4
FEW, MANY = ((3, 37), (1, 1030), (6, 10)), ((64, 32), (1, 7), (5, 4100), (1, 8192), (2, 1024))
"""Rows and widths; the slots that a sum uses, and the values in them, change from one to the next."""


def cases(size: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The parts (R, M, E) of all ranks, a residual (M, E) and weights (E,), the same for every rank."""
    generator = torch.Generator().manual_seed(size)
    for num_rows, width in shapes:
        parts_RME, x_ME, weight_E = (
            torch.randn(sizes, generator=generator).to(dtype)
            for sizes in ((size, num_rows, width), (num_rows, width), (width,))
        )
        yield parts_RME, x_ME, weight_E


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in another format; the interpreter cuts bf16 off rather than rounds."""
    return (exact.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype) if dtype is BF16 else exact.to(dtype)


def in_order(parts_RME: Tensor) -> Tensor:
    """The sum in fp32, in the order of the ranks, rounded once."""
    total = torch.zeros_like(parts_RME[0], dtype=torch.float32)
    for part_ME in parts_RME:
        total += part_ME.float()
    return rounded(total, parts_RME.dtype)


def check_rank(rank: int, memories_R: Tensor, shapes: Sequence[tuple[int, int]]) -> None:
    """Sum every case alone, then with residual and norm; counts begin shortly before they wrap around."""
    counts = torch.full((sums_gpu.NUM_SLOTS,), FIRST_COUNT, dtype=torch.int32)
    sums = sums_gpu.PeerSums(rank=rank, memories_R=memories_R, counts=counts)
    for dtype in (torch.float32, torch.float16, BF16):
        for parts_RME, x_ME, weight_E in cases(len(memories_R), shapes, dtype):
            sum_ME, part_ME = in_order(parts_RME), parts_RME[rank].clone()
            strided_ME = part_ME.clone() if rank else torch.stack([part_ME, part_ME], -1)[..., 0]
            summed_ME = sums.all_reduce(strided_ME)
            assert torch.equal(summed_ME, sum_ME), (rank, dtype, x_ME.shape)
            added_ME = rounded(x_ME.float() + sum_ME.float(), dtype)
            normed_ME = sums.add_norm(part_ME, x_ME, weight_E, EPS)
            assert torch.equal(x_ME, added_ME), (rank, dtype, x_ME.shape)
            exact_ME = functional.rms_norm(added_ME.float(), weight_E.shape, weight_E.float(), EPS)
            assert_close(normed_ME.float(), exact_ME, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            if dtype is not BF16:  # whose sums the interpreter does not compute
                assert torch.equal(normed_ME, between_gpu.add_norm(added_ME, None, weight_E, EPS))


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
    check_patience()
    for number in map(int, sys.argv[2:]):
        check(number, {"few": FEW, "many": MANY}[sys.argv[1]])

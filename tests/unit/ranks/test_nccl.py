"""A failure of NCCL is its own last line, the usual remedy, and no time-out."""

import pytest
import torch.distributed as dist

from llama_ssp.errors import LostRankError
from llama_ssp.ranks.memory import exhaustion
from tests.unit.ranks.test_faults import Others, ended

pytestmark = pytest.mark.usefixtures("_signal_handlers")
FIRST = "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO), NCCL version 2.28.9\n"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Error while creating shared memory segment /dev/shm/nccl-8G, error: No space left", "--shm-size"),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME=NAME"),
        ("socketPollConnect: connect returned timed out, exceeded error retry count", "NCCL_SOCKET_IFNAME=NAME"),
        ("Message truncated : received 512 bytes instead of 256", "the same torch and NCCL"),
        ("Mismatched NCCL version detected : rank 0 has 2.28.9, rank 1 2.30.1", "the same torch and NCCL"),
        ("Cuda failure 2 'out of memory'", "end other programs on the GPU"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "one rank for each GPU"),
    ],
)  # fmt: skip
def test_the_last_line_and_the_remedy_of_its_kind_are_the_sentence(said: str, remedy: str) -> None:
    error = dist.DistBackendError(f"{FIRST}ncclSystemError: System call failed. \nLast error:\n{said}\n")
    assert exhaustion(error) is None, "its own words would be lost"
    found = ended(error, Others())
    assert isinstance(found, LostRankError)
    assert str(found).startswith(f"rank 1 failed while decoding: NCCL: {said}; ")
    assert remedy in str(found)
    assert str(found).endswith("; NCCL_DEBUG=INFO in the environment shows more")


def test_a_rank_that_nccl_has_lost_is_named_instead() -> None:
    error = dist.DistBackendError(f"{FIRST}ncclRemoteError: A call failed possibly due to a network error")
    assert str(ended(error, Others(gone=(2,)))).startswith("rank 2 is missing while decoding (connection closed)")

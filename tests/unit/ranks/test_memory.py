"""What this process holds, and what a GPU has lost."""

import mmap
import sys
import time

import pytest
import torch

from llama_ssp.ranks import memory


def test_a_gpus_memory_is_what_it_has_lost_at_most_as_plans_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 bytes torch reserved up to 60, now 40; context, NCCL and graphs hold 13, and then 5."""
    told = {"mem_get_info": (47, 100), "memory_reserved": 40, "max_memory_reserved": 60}
    for name in (*told,):
        monkeypatch.setattr(torch.cuda, name, lambda _device, name=name: told[name])
    watch = memory.MemoryWatch(torch.device("cuda", 0))
    watch.sample()
    assert watch.peak_bytes == 60 + 13
    told["mem_get_info"] = 55, 100
    watch.sample()
    assert watch.peak_bytes == 60 + 13


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
def test_memory_that_is_freed_again_counts_where_a_watch_looks_closely() -> None:
    """Pages are mapped anew: an allocator may hand out what this process has already touched and freed."""
    watch = memory.MemoryWatch(torch.device("cpu"))
    with watch.closely(), mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(bytes([1]) * len(held))
        deadline = time.monotonic() + 10
        # What earlier tests leave may be freed meanwhile, so that the least is read while the pages are held.
        least_bytes = (memory.anonymous_bytes() or 0) - 2**25
        while (watch.peak_bytes or 0) < least_bytes and time.monotonic() < deadline:
            time.sleep(0.001)
            least_bytes = (memory.anonymous_bytes() or 0) - 2**25
    assert (watch.peak_bytes or 0) >= least_bytes

"""Who a process is, where it computes, and which cores are its own."""

import os

import pytest
import torch

from llama_ssp.config.schema import DeviceKind
from llama_ssp.distributed.environment import Ranks, read_ranks
from llama_ssp.distributed.world import choose_device, on_all_cores, share_cores
from llama_ssp.errors import PlacementError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM_STEP = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_ID": "0",
}  # fmt: skip
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}
FIFTH_OF_EIGHT = Ranks(rank=5, size=8, local_rank=1, local_size=4)
ALONE = Ranks(rank=0, size=1, local_rank=0, local_size=1)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [(TORCHRUN, FIFTH_OF_EIGHT), (SLURM_STEP, FIFTH_OF_EIGHT), (BATCH_SCRIPT, ALONE), ({}, ALONE)],
    ids=["torchrun", "a SLURM step", "a batch script outside of any step", "plain python"],
)
def test_the_launcher_says_who_a_process_is(environ: dict[str, str], ranks: Ranks) -> None:
    assert read_ranks(environ) == ranks


def test_every_rank_has_a_gpu_or_none_has_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(DeviceKind.auto, FIFTH_OF_EIGHT) == (torch.device("cuda", 1), None)
    assert choose_device(DeviceKind.cpu, FIFTH_OF_EIGHT) == (torch.device("cpu"), None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    device, note = choose_device(DeviceKind.auto, FIFTH_OF_EIGHT)
    assert device.type == "cpu"
    assert note == "4 ranks on a node with 3 GPUs: all ranks run on the CPU"
    with pytest.raises(PlacementError, match="at most 3 ranks"):
        choose_device(DeviceKind.cuda, FIFTH_OF_EIGHT)


@pytest.mark.parametrize(
    ("num_cores", "threads", "own"), [(8, 2, [{2, 3}]), (4, 1, [{1}]), (2, 1, [])], ids=["more", "as many", "fewer"]
)
def test_the_ranks_of_a_node_share_its_cores(
    num_cores: int, threads: int, own: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[int]] = []
    set_threads: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(set(cores)))
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    assert share_cores(FIFTH_OF_EIGHT) == threads
    assert (kept, set_threads) == (own, [threads])


def test_a_lone_process_keeps_the_threads_that_its_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("the number of threads was changed"))
    assert share_cores(ALONE) == torch.get_num_threads()


def test_groups_are_made_on_all_cores_and_the_share_comes_back() -> None:
    cores = os.sched_getaffinity(0)
    share = {min(cores)}
    os.sched_setaffinity(0, share)
    try:
        with on_all_cores(frozenset(cores)):
            assert os.sched_getaffinity(0) == cores
        assert os.sched_getaffinity(0) == share
    finally:
        os.sched_setaffinity(0, cores)

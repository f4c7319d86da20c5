"""Who a process is, where it listens, which is no wider than those who connect need, and which cores are its own."""

import os
import socket
from ipaddress import ip_address
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llama_ssp.errors import ConfigError
from llama_ssp.ranks import world
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import ControlChannel
from llama_ssp.ranks.process import Ranks, are_all_here, listen, read_ranks, signals_kept, stay_on_loopback
from llama_ssp.ranks.rendezvous import Seen
from llama_ssp.ranks.world import on_all_cores, share_cores
from llama_ssp.settings.schema import DeviceKind
from tests.helpers.sockets import is_loopback

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM_STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_ID": "0",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}
FIFTH_OF_EIGHT = Ranks(rank=5, size=8, local_rank=1, local_size=4)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ALONE = Ranks(rank=0, size=1, local_rank=0, local_size=1)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        (TORCHRUN, FIFTH_OF_EIGHT),
        (TORCHRUN | SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}, FIFTH_OF_EIGHT),
        (SLURM_STEP, FIFTH_OF_EIGHT),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),4", "SLURM_NODEID": "2"}, FIFTH_OF_EIGHT),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,4,1", "SLURM_NODEID": "1"}, FIFTH_OF_EIGHT),
        (BATCH_SCRIPT, ALONE),
        ({}, ALONE),
    ],
    ids=[
        "torchrun",
        "torchrun in a SLURM step",
        "a SLURM step",
        "a SLURM step on nodes of two sizes",
        "a SLURM step on nodes of three sizes",
        "a batch script outside of any step",
        "plain python",
    ],
)
def test_the_launcher_says_who_a_process_is(environ: dict[str, str], ranks: Ranks) -> None:
    assert read_ranks(environ) == ranks


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x is not a whole number from 0 on"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE= is not"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is not"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE=two is not"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        (SLURM_STEP | {"SLURM_PROCID": "x"}, "SLURM_PROCID=x is not"),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(xx)"}, r"SLURM_STEP_TASKS_PER_NODE=4\(xx\) is not"),
        (SLURM_STEP | {"SLURM_NODEID": "first"}, "SLURM_NODEID=first is not"),
    ],
)
def test_a_variable_that_is_no_number_is_named_with_what_sets_it(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"{sentence}.*; torchrun or srun sets it: unset it to run alone"):
        read_ranks(environ)


@pytest.mark.parametrize(
    ("environ", "are_here"),
    [
        ({}, True),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, True),
        (TORCHRUN, False),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, False),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "8"}, True),
        (SLURM_STEP, False),
    ],
)
def test_only_a_launcher_that_says_so_has_all_ranks_here(environ: dict[str, str], *, are_here: bool) -> None:
    assert are_all_here(environ) == are_here


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_an_address_is_bound_alone(host: str) -> None:
    with listen(host) as server:
        assert server.getsockname()[0] == host


@pytest.mark.parametrize("host", ["localhost", "198.51.100.7"])
def test_a_name_and_an_address_elsewhere_may_mean_any_interface(host: str) -> None:
    with listen(host) as server:
        assert not is_loopback(ip_address(server.getsockname()[0]))
        socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5).close()


def test_a_port_in_use_is_an_error() -> None:
    with listen("127.0.0.1") as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("local_size", "given", "interfaces"),
    [("8", None, ("lo", "=lo")), ("8", "eth7", ("eth7", "eth7")), ("4", None, (None, None))],
)
def test_libraries_stay_on_the_loopback_of_one_machine_unless_the_user_has_chosen(
    local_size: str, given: str | None, interfaces: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": local_size}.items():
        monkeypatch.setenv(name, value)
    for name in INTERFACES:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    stay_on_loopback()
    seen = tuple(os.environ.pop(name, None) for name in INTERFACES)
    assert seen == interfaces


@pytest.mark.parametrize(
    ("num_cores", "sharers", "threads", "own"),
    [
        (8, (4, 5, 6, 7), 2, [{2, 3}]),
        (4, (4, 5, 6, 7), 1, [{1}]),
        (2, (4, 5, 6, 7), 1, []),
        (2, (5,), 2, []),
        (4, (5, 7), 2, [{0, 1}]),
    ],
    ids=["more", "as many", "fewer", "bound by srun", "bound to a socket by srun"],
)
def test_ranks_that_may_use_the_same_cores_share_them(
    num_cores: int, sharers: tuple[int, ...], threads: int, own: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[int]] = []
    set_threads: list[int] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(set(cores)))
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    share_cores(FIFTH_OF_EIGHT, cores=frozenset(range(num_cores)), sharers=sharers)
    assert (kept, set_threads) == (own, [threads])


@pytest.mark.parametrize(
    ("others", "num_sharers", "crowded"),
    [([("here", (0, 1))] * 3, 4, True), ([("here", (2, 3)), ("here", (0, 1)), ("there", (0, 1))], 2, False)],
    ids=["one mask for all", "a mask for each socket, and another host"],
)
def test_ranks_of_a_host_with_the_same_mask_share_cores(
    others: list[tuple[str, tuple[int, ...]]], num_sharers: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rank 1 of four, which have met without the three others."""
    seen, found = [Seen(host, 4, cores) for host, cores in (others[0], ("here", (0, 1)), *others[1:])], list[bool]()

    def of_world(*, crowded: bool, **_: object) -> SimpleNamespace:
        found.append(crowded)
        return SimpleNamespace(set_timeout=lambda _: None, barrier=lambda: None)

    for key, value in {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world, "_watch", lambda *_: ControlChannel.alone())
    monkeypatch.setattr(world, "open_store", lambda *_, **__: None)
    monkeypatch.setattr(world, "seen_by_all", lambda *_, **__: seen)
    monkeypatch.setattr(Comm, "of_world", of_world)
    with signals_kept(), world.start(device=DeviceKind.cpu, timeout_s=5.0) as job:
        assert (job.num_sharers, set(job.cores)) == (num_sharers, {0, 1})
    assert found == [crowded]


def test_a_lone_process_keeps_the_threads_that_its_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("the number of threads was changed"))
    share_cores(ALONE, cores=frozenset({0, 1}), sharers=(0,))


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


def test_a_process_that_nccl_does_not_let_end_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(world, "_END_S", 0.0)
    world._end_anyway()
    assert left == [0]
    assert "left without NCCL, which had not ended after 0 s; all results are written" in caplog.text

"""Where ranks listen: no wider than those who connect need."""

import os
import socket
from ipaddress import ip_address

import pytest

from llama_ssp.ranks.process import are_all_here, listen, stay_on_loopback
from tests.helpers.sockets import is_loopback

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("environ", "are_here"),
    [
        ({}, True),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, True),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, False),
        (TORCHRUN, False),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, True),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, False),
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
    [("4", None, ("lo", "=lo")), ("4", "eth7", ("eth7", "eth7")), ("2", None, (None, None))],
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

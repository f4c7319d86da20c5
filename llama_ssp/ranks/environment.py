"""Who a rank is, by the environment of torchrun or SLURM, and where it may listen; does not import torch.

The ranks of one machine listen on its loopback. Between several machines whoever reaches a port can take part in the
run, so their network has to be trusted.
"""

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

LOOPBACK = "127.0.0.1"
# What gloo and NCCL call the interface; "=" asks NCCL for exactly this name.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank and size, in the world and on this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's variables, else from those of a SLURM step; by default a single rank.

    A batch script outside a step also has SLURM_PROCID; only a step has SLURM_STEP_ID.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return Ranks(rank=0, size=1, local_rank=0, local_size=1)
    rank, size = int(environ[names[0]]), int(environ[names[1]])
    local_rank = int(environ.get(names[2], rank))
    local_size = _of_node(environ.get(names[3], str(size)), node=int(environ.get("SLURM_NODEID", 0)))
    return Ranks(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def launcher_of(environ: Mapping[str, str]) -> str | None:
    """Name what started this process as a rank; None if nothing did. A shell in a step of one task is no rank."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    return "srun" if read_ranks(environ).size > 1 else None


def _of_node(counts: str, *, node: int) -> int:
    """A node's number of tasks: SLURM writes "4(x2),3" for four on each of two nodes and three on the last one."""
    number = ""
    for each in counts.split(","):
        number, _, repeated = each.partition("(x")
        node -= int(repeated.rstrip(")") or 1)
        if node < 0:
            break
    return int(number)


def are_all_here(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine; without LOCAL_WORLD_SIZE, RANK and WORLD_SIZE do not say."""
    if "RANK" in environ and "LOCAL_WORLD_SIZE" not in environ:
        return False
    ranks = read_ranks(environ)
    return ranks.local_size == ranks.size


def meeting_host(environ: Mapping[str, str]) -> str:
    """The host of rank 0: the loopback if all ranks are here, else as torchrun says, or a SLURM step's first node."""
    if are_all_here(environ):
        return LOOPBACK
    return environ.get("MASTER_ADDR") or environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")


def stay_on_loopback() -> None:
    """Let gloo and NCCL connect over the loopback, if all ranks are here and the user has chosen no interface."""
    if are_all_here(os.environ):
        for name, interface in _INTERFACES.items():
            os.environ.setdefault(name, interface)


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a socket for those who connect to `host`, which is this machine.

    An address is bound alone. A name, or the address of a router that leads here, may mean any interface.
    """
    try:
        family = socket.AF_INET6 if isinstance(ip_address(host), IPv6Address) else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
    except ValueError:
        pass
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN)

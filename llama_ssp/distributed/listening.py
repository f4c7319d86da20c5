"""Where ranks listen: on the loopback when all of them are on one machine. Does not import torch.

Between several machines whoever reaches a port can take part in the run, so their network has to be trusted.
"""

import errno
import os
import socket
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address

from llama_ssp.distributed.environment import read_ranks

LOOPBACK = "127.0.0.1"
# What gloo and NCCL call the interface; "=" asks NCCL for exactly this name.
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def are_all_here(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine; without LOCAL_WORLD_SIZE, RANK and WORLD_SIZE do not say."""
    if "RANK" in environ and "LOCAL_WORLD_SIZE" not in environ:
        return False
    ranks = read_ranks(environ)
    return ranks.local_size == ranks.size


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

"""Worlds of one process, for tests of tasks that measure."""

import torch

from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.process import Ranks
from llama_ssp.ranks.world import World

ONE_CORE = World(
    cores=frozenset({0}),
    comm=Comm.single(),
    ranks=Ranks(rank=0, size=1, local_rank=0, local_size=1),
    device=torch.device("cpu"),
    note=None,
)

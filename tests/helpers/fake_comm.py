"""Ranks as threads of one process, for what needs the arithmetic of several ranks but no process group."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from queue import SimpleQueue
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from llama_ssp.ranks.comms import Comm

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ThreadComm(Comm):
    """Collectives over a table that all threads see; a thread that fails breaks the barrier for all."""

    meeting: Barrier
    table: list[Tensor]
    mail: dict[tuple[int, int], SimpleQueue[Tensor]]
    delivered: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of what was delivered from here."""

    def do_all_reduce(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self._swap(values)).sum(0))

    def do_all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        slices = self._swap(values)
        assert tuple(part.shape[-1] for part in slices) == sizes
        return torch.cat(slices, dim=-1)

    def do_broadcast(self, values: Tensor, src: int) -> Tensor:
        return values.copy_(self._swap(values)[src])

    def do_send(self, values: Tensor, dst: int) -> Tensor:
        self.mail[self.rank, dst].put(values.clone())
        return values

    def do_receive(self, values: Tensor, src: int) -> Tensor:
        return values.copy_(self.mail[src, self.rank].get(timeout=60))

    def deliver(self, values: Tensor | None, *, shape: tuple[int, ...], src: int, dst: int) -> None:
        if self.rank == src and values is not None:
            assert values.shape == shape
            self.delivered.append(shape)
            self.send(values, dst=dst)
        elif self.rank == dst and values is not None:
            self.receive(values, src=src)

    def gather_text(self, text: str) -> list[str]:
        return [bytes(part.tolist()).decode() for part in self._swap(torch.tensor([*text.encode()], dtype=torch.uint8))]

    def all_say(self, words: str) -> bool:
        return {*self.gather_text(words)} == {words}

    def barrier(self) -> None:
        self.meeting.wait(timeout=60)

    def _swap(self, values: Tensor) -> list[Tensor]:
        self.table[self.rank] = values.clone()
        self.meeting.wait(timeout=60)
        slices = list(self.table)
        self.meeting.wait(timeout=60)
        return slices


def thread_comms(num_ranks: int) -> list[ThreadComm]:
    meeting, table = Barrier(num_ranks), [torch.empty(0)] * num_ranks
    mail = {pair: SimpleQueue[Tensor]() for pair in product(range(num_ranks), range(num_ranks))}
    return [ThreadComm(rank=rank, size=num_ranks, meeting=meeting, table=table, mail=mail) for rank in range(num_ranks)]


def on_ranks(comms: Sequence[ThreadComm], work: Callable[[ThreadComm], Result]) -> list[Result]:
    """Run `work` once per rank, all at the same time; returns the results in rank order."""

    def one_rank(comm: ThreadComm) -> Result:
        try:
            return work(comm)
        except BaseException:
            comm.meeting.abort()
            raise

    with ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(one_rank, comms))

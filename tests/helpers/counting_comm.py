"""Counts the bytes that arrive on a rank."""

from dataclasses import dataclass, field

from torch import Tensor

from llama_ssp.ranks.comms import Comm


@dataclass(frozen=True, kw_only=True)
class CountingComm(Comm):
    """A group's end that counts the bytes which arrive here."""

    arrived: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def of(cls, comm: Comm) -> "CountingComm":
        """The same end, counting."""
        return cls(rank=comm.rank, size=comm.size, members=comm.members, device=comm.device, board=comm.board)

    def do_broadcast(self, values: Tensor, src: int) -> Tensor:
        """Counts on all ranks but the sender."""
        self._count(values.nbytes * (self.size > 1 and self.rank != src))
        return super().do_broadcast(values, src)

    def do_receive(self, values: Tensor, src: int) -> Tensor:
        """Counts what it fills."""
        self._count(values.nbytes)
        return super().do_receive(values, src)

    def do_all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Counts the other ranks' slices, which travel at the width of the widest."""
        self._count(max(sizes) * values.itemsize * (self.size - 1))
        return super().do_all_gather_last(values, sizes)

    def _count(self, num_bytes: int) -> None:
        self.arrived[0] += num_bytes

"""Ranks fail together: what one of them raises, all of them raise, before any waits for a peer that has given up."""

from collections.abc import Iterator
from contextlib import contextmanager

from llama_ssp import errors
from llama_ssp.distributed.comms import Comm
from llama_ssp.errors import SspError

_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SspError)
}


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """Run a block on every rank, then raise everywhere the first user error that any rank met.

    Args:
        comm: the ranks, all of which enter the block.

    Raises:
        SspError: of the lowest rank that met one; a note names the rank when others did not.
    """
    mine: SspError | None = None
    try:
        yield
    except SspError as error:
        mine = error
    words = comm.gather_text(f"{type(mine).__name__}\n{mine}" if mine else "")
    failed = [rank for rank, word in enumerate(words) if word]
    if failed:
        kind, _, message = words[failed[0]].partition("\n")
        where = "" if len(failed) == comm.size else f" (rank {failed[0]})"
        raise _KINDS[kind](message + where) from mine

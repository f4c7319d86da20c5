"""Ranks fail together: what one of them raises, all of them raise, before any waits for a peer that has given up."""

from collections.abc import Iterator
from contextlib import contextmanager

from llama_ssp import errors
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.exhaustion import exhaustion
from llama_ssp.errors import SspError

_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SspError)
}


@contextmanager
def raise_on_all_ranks(comm: Comm) -> Iterator[None]:
    """Run a block on every rank, then raise everywhere the first user error that any rank met.

    Args:
        comm: the ranks, all of which enter the block.

    Raises:
        SspError: of the lowest rank that met one, or that ran out of memory or disk; the message names the rank when
            others did not.
    """
    mine: SspError | None = None
    try:
        yield
    except SspError as error:
        mine = error
    except (MemoryError, OSError, RuntimeError) as error:
        mine = exhaustion(error)
        if mine is None:
            raise
    words = comm.gather_text(to_message(mine) if mine else "")
    failed = [rank for rank, word in enumerate(words) if word]
    if failed:
        where = "" if len(failed) == comm.size else f" (rank {failed[0]})"
        raise from_message(words[failed[0]] + where) from mine


def to_message(error: SspError) -> str:
    """Write an error as a text for other ranks."""
    return f"{type(error).__name__}\n{error}"


def from_message(words: str) -> SspError:
    """Make the error again that another rank has written."""
    kind, _, message = words.partition("\n")
    return _KINDS[kind](message)

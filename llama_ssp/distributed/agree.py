"""Raises an error of one rank on all ranks, so that no rank waits for a peer that has failed."""

from collections.abc import Iterator
from contextlib import contextmanager

from llama_ssp import errors
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.memory import exhaustion
from llama_ssp.errors import SspError

_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SspError)
}


@contextmanager
def raise_on_all_ranks(comm: Comm) -> Iterator[None]:
    """Run a block on every rank of `comm`, then raise the first user error of any rank on all of them.

    It is that of the lowest rank that raised one, or ran out of memory or disk; it names the rank if others succeeded.
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
    messages = comm.gather_text(to_message(mine) if mine else "")
    failed = [rank for rank, message in enumerate(messages) if message]
    if failed:
        where = "" if len(failed) == comm.size else f" (rank {failed[0]})"
        raise from_message(messages[failed[0]] + where) from mine


def to_message(error: SspError) -> str:
    """Serialize an error for other ranks."""
    return f"{type(error).__name__}\n{error}"


def from_message(text: str) -> SspError:
    """Deserialize an error; see `to_message`."""
    kind, _, message = text.partition("\n")
    return _KINDS[kind](message)

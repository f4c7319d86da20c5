"""What rank 0 alone can know, made known to all ranks."""

import json
from collections.abc import Callable
from typing import Any

from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import raise_on_all_ranks


def from_rank_0(comm: Comm, make: Callable[[], object]) -> Any:  # noqa: ANN401 - whatever JSON can hold
    """Return what `make` returns on rank 0, as JSON holds it, on every rank; an SspError of it is raised on all."""
    text = ""
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            text = json.dumps(make())
    return json.loads(comm.broadcast_text(text, src=0))

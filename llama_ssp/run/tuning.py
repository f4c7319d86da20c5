"""Makes a decoder ready for a run: caches, and what it must have measured before.

All ranks use what rank 0 measured.
"""

import math
import time
from collections.abc import Sequence
from functools import partial

from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.registry import imported
from llama_ssp.reports.folder import RunFolder
from llama_ssp.settings.schema import RunConfig
from llama_ssp.speculate.engine.lengths import FixedLength
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request

NUM_WARM, NUM_TIMED, ENOUGH_S = 2, 16, 2.0
"""Rounds that warm up, the most that are timed after them, and the seconds after which fewer do."""


def make_ready(
    decoder: Decoder, requests: Sequence[Request], config: RunConfig, *, comm: Comm, folder: RunFolder | None = None
) -> None:
    """Allocate caches for requests, and once for each decoder make what chooses the K and the rows of its rounds.

    All ranks must call this together; most decoders have no such choice. `comm` has all ranks. On rank 0, `folder` is
    the run folder. Raises as the code that chooses K does, and ConfigError if that code cannot be imported.
    """
    decoder.make_room(requests)
    round_ = decoder.round

    def in_the_middle() -> int:
        return max((len(request.prompt_ids) + request.max_new_tokens // 2 for request in requests), default=0)

    if round_.drafters and round_.steps and decoder.picks_rows and decoder.reading_rows == math.inf:
        decoder.reading_rows = _measure_reading(decoder, comm=comm, num_slots=in_the_middle())
    chooser = config.speculation.chooser
    if chooser and round_.drafters and type(decoder.length) is FixedLength:
        make = imported(chooser.make, setting=f"speculation.num_draft_tokens={chooser.name}")
        decoder.choose_by(make(decoder, config, num_slots=in_the_middle(), comm=comm, folder=folder))


def _measure_reading(decoder: Decoder, *, comm: Comm, num_slots: int) -> float:
    """Measure `Decoder.reading_rows` from plain rounds of one row and of all rows in turn; the fastest ones count."""
    numbers, plain, found = (1, None), [DraftChoice(0)], list[list[float]]()
    started = time.perf_counter()
    for repetition in range(NUM_WARM + NUM_TIMED):
        found.append([decoder.time_rounds(plain, num_slots=num_slots, num_rows=number)[0] for number in numbers])
        is_enough = repetition > NUM_WARM and time.perf_counter() - started > ENOUGH_S
        if from_rank_0(comm, partial(bool, is_enough)):
            break
    one_s, all_s = (min(of_number) for of_number in zip(*found[NUM_WARM:], strict=True))
    row_s = (all_s - one_s) / (decoder.batch_size - 1)
    reading_rows: float = from_rank_0(comm, lambda: max(one_s / row_s - 1, 0.0) if row_s > 0 else math.inf)
    return reading_rows

"""Chooses at the start how rounds that overlap go on after a rejection, by what both models take on this machine.

All ranks act on the choice of rank 0. A run folder keeps it, so that a resumed run goes on in the same way.
"""

import json
import logging
from contextlib import suppress
from typing import Any

from llama_ssp.config.schema import RunConfig
from llama_ssp.distributed.agree import raise_on_all_ranks
from llama_ssp.distributed.comms import Comm
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.overlap import OverlappedRound
from llama_ssp.errors import ConfigError
from llama_ssp.planning.overlap import OverlappedTime, better_to_wait
from llama_ssp.reports.reading import read_json
from llama_ssp.reports.records import OVERLAP_FILE, RunFolder
from llama_ssp.session.draft_length import expected_acceptance

_NUM_WARM, _NUM_TIMED = 3, 8
_log = logging.getLogger(__name__)


def settle_overlap(
    decoder: Decoder, config: RunConfig, *, comm: Comm, num_slots: int, folder: RunFolder | None = None
) -> None:
    """Choose once for a decoder, if its drafting overlaps verification; all ranks must call this together.

    For arguments and errors see `draft_length.settle_length`.
    """
    round_ = decoder.round
    if not isinstance(round_, OverlappedRound) or round_.waits is not None:
        return
    kept = None
    with raise_on_all_ranks(comm):
        kept = folder.read_measured(OVERLAP_FILE) if folder else None
        if kept is not None:
            _waits(kept)
    kept = comm.broadcast_text(kept or "", src=0)
    if not kept:
        found = _measured(decoder, comm=comm, num_slots=num_slots)
        time, written = OverlappedTime(**found), ""
        with raise_on_all_ranks(comm):
            waits = better_to_wait(
                time, acceptance=expected_acceptance(config)[0], num_draft_tokens=round_.num_ahead + 1,
                batch_size=decoder.batch_size,
            )  # fmt: skip
            written = json.dumps({"waits": waits} | found, indent=1) + "\n"
        kept = comm.broadcast_text(written, src=0)
        with raise_on_all_ranks(comm):
            if folder:
                folder.write_measured(OVERLAP_FILE, kept)
    round_.waits = _waits(kept)
    _log.info("after a rejection: %s", "waits for a block" if round_.waits else "verifies one token early")


def _measured(decoder: Decoder, *, comm: Comm, num_slots: int) -> dict[str, float]:
    """Seconds of K draft steps and of the target's forward, each while the other goes on; the mean of some rounds."""
    choice, executor = decoder.length.choices[0], decoder.executor
    decoder.time_rounds([choice] * _NUM_WARM, num_slots=num_slots)
    decoder.time_rounds([choice] * _NUM_TIMED, num_slots=num_slots)
    drafts = bool(getattr(executor, "drafts_here", False))
    each = [json.loads(text) for text in comm.gather_text(json.dumps([drafts, decoder.worked_s / _NUM_TIMED]))]
    return {
        name: max(seconds for of_draft, seconds in each if of_draft is is_draft)
        for name, is_draft in (("draft_s", True), ("forward_s", False))
    }


def _waits(text: str) -> bool:
    content: Any = None
    with suppress(ValueError):
        content = read_json(text)
    if not isinstance(content, dict) or not isinstance(content.get("waits"), bool):
        raise ConfigError(f"{OVERLAP_FILE} of run_dir is damaged: delete it to measure again")
    return bool(content["waits"])

"""Ends a process whose main thread waits inside a library for a GPU that never finishes.

Most waits for a device are in `device_wait`. Others are made by libraries and have no limit: a copy to the host, a
launch into a full queue, a new communicator. Python is not asked meanwhile, so no signal and no error can end them.
A thread ends the process instead, with the error and the status that the main thread would have reported:

    the run has failed, by the control channel      the main thread has a few seconds to end by itself
    no wait has ended within the timeout            all ranks are called, and one leaves several calls unanswered:
                                                    a rank that compiles for long does answer
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch.distributed as dist

from llama_ssp.errors import SspError
from llama_ssp.ranks.failures import ControlChannel, Phase, ending_of
from llama_ssp.ranks.gpu.device_wait import DeviceWait

_LOOK_EVERY_S = 0.25
_NOTICE_S = 3.0  # more than the grace of a wait, and the calls of a main thread that has noticed
_NUM_CALLS = 3  # a rank may be inside a library that does not let its other threads run

_log = logging.getLogger(__name__)


@contextmanager
def guard(
    watch: ControlChannel, waits: DeviceWait | None, phase: Phase, *, report: Callable[[SspError], None]
) -> Iterator[None]:
    """End this process if the main thread does not come back from a wait within the block; without waits, do nothing.

    `report` is called with the error, from a thread, before the process ends.
    """
    if waits is None:
        yield
        return
    is_over = Event()
    Thread(target=_look, args=(watch, waits, phase, report, is_over), daemon=True, name="watchdog").start()
    try:
        yield
    finally:
        is_over.set()


def _look(
    watch: ControlChannel, waits: DeviceWait, phase: Phase, report: Callable[[SspError], None], is_over: Event
) -> None:
    error = _first_loss(watch, waits, is_over)
    if error is None:
        return
    ending = ending_of(error, watch, phase)
    assert isinstance(ending, SspError), "errors of a collective are foreseen"
    if is_over.is_set():  # the main thread has come back meanwhile, and reports the same
        return
    _log.error("the main thread does not come back: %s", ending)
    try:
        report(ending)
    finally:
        os._exit(ending.exit_code)


def _first_loss(watch: ControlChannel, waits: DeviceWait, is_over: Event) -> dist.DistBackendError | None:
    """Wait until a rank is lost and the main thread has had time to notice; None if the block ends before."""
    failed_s: float | None = None
    called_s, num_unanswered = waits.passed_s, 0
    while not is_over.wait(_LOOK_EVERY_S):
        now = time.monotonic()
        if watch.has_failed:
            failed_s = failed_s or now
            if now - failed_s >= _NOTICE_S:
                return dist.DistBackendError("a rank has ended")
        elif num_unanswered or now - max(called_s, waits.passed_s) >= waits.timeout_s:
            num_unanswered = num_unanswered + 1 if watch.missing() else 0
            called_s = time.monotonic()
            if num_unanswered == _NUM_CALLS:
                return dist.DistBackendError(f"timed out after {waits.timeout_s:g} s")
    return None

"""Signals that ask a run to stop: they set a flag, and the loop ends after the current round on every rank alike."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llama_ssp.ranks.process import handle_signals, heeded_signals, signals_kept
from llama_ssp.ranks.world import World
from llama_ssp.speculate.engine.completion import StopRequest


@contextmanager
def stopping_on_signals(stop_request: StopRequest, world: World) -> Iterator[Callable[[], None]]:
    """Let Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP set `stop_request` while the block runs, however often they come.

    The first signal also tells the other ranks, which may not have received it. After the block, all ranks agree on
    whether the run must end here, and `stop_request` has the result.

    If they agree on a stop, further signals still do nothing: SLURM and torchrun both forward a SIGTERM, and the second
    one must not end a process that is writing its last records. A request that comes too late for the agreement is
    raised again as a signal for the code after the block.

    Yields:
        A function that has the effect of a signal.
    """

    def stop(number: int = signal.SIGTERM) -> None:
        if stop_request.ask(by_interrupt=number == signal.SIGINT):
            world.watch.ask_to_stop()

    before = {number: signal.signal(number, lambda number, _: stop(number)) for number in heeded_signals()}
    is_agreed = False
    try:
        yield stop
        is_agreed = any(world.comm.gather_text("stop" if stop_request.requested else ""))
    except BaseException:
        is_agreed = stop_request.requested
        raise
    finally:
        if not is_agreed:
            for number, handler in before.items():
                signal.signal(number, handler)
    if stop_request.requested and not is_agreed:  # it came after the agreement: raise it again for later code
        stop_request.settle(is_agreed=False)
        signal.raise_signal(signal.SIGTERM)
    stop_request.settle(is_agreed=is_agreed)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP raise KeyboardInterrupt while the block waits for the user's input."""
    with signals_kept():
        handle_signals(signal.default_int_handler)
        yield

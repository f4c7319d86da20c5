"""What tests of failing ranks share."""

import signal
from collections.abc import Iterator

import pytest

from llama_ssp.ranks.process import STOP_SIGNALS


@pytest.fixture
def _signal_handlers() -> Iterator[None]:
    """Restore the handlers of signals, which the end of a run sets aside."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

"""Many clients at once: nothing is lost, and no text is another one; `benchmarks.load` does so for minutes."""

import pytest

from benchmarks.load import BODIES, load, text_of
from llama_ssp import load as load_pair
from tests.extensions.serve.server import serving
from tests.helpers.disturbed import wait_for

NUM_CLIENTS, SECONDS, BATCH_SIZE, NUM_BODIES = 64, 60, 16, 35


@pytest.mark.slow
def test_nothing_is_lost_under_load_and_no_text_is_wrong() -> None:
    """A third without drafts, a fifth with settings of their own, one in twenty cancelled, some while they wait."""
    with serving(load_pair("tiny", "tiny-draft"), batch_size=BATCH_SIZE) as server:
        bodies = BODIES[:NUM_BODIES]
        texts = [text_of(server.port, body) for body in bodies]
        report = load(server.port, bodies, texts, num_clients=NUM_CLIENTS, seconds=SECONDS)
        wait_for(lambda: server.inbox.is_empty)
        assert report.wrong == []
        assert load(server.port, bodies[:1], ["another"], num_clients=1, seconds=1).wrong, "a wrong text is seen"
        assert len(report.whole_s) >= NUM_CLIENTS
        assert report.first_s
        assert "llama_ssp_running 0.0" in server.ask("/metrics")[1]
        assert [text_of(server.port, body) for body in bodies[:9]] == texts[:9]

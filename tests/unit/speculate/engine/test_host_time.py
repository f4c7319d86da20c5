"""Time of drafters on the host is no time of drafting, and no part of a round takes less than none."""

from types import SimpleNamespace

from llama_ssp.speculate.drafters.drafter import HostTimed
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import make_decoder
from tests.helpers.prefix_runner import PrefixRunner


def test_host_time_of_a_draft_that_the_device_has_not_passed_is_taken_off_later() -> None:
    decoder, drafter = make_decoder(PrefixRunner(), PrefixRunner()), HostTimed()
    decoder._host_timed = [drafter]
    known = iter([(0.0, 0.0), (2.0, 1.0), (2.0, 1.0)])
    decoder.clock = SimpleNamespace(take=lambda: next(known))  # type: ignore[assignment]
    row = RowCompletion(request=Request(index=0, prompt_ids=(1,), max_new_tokens=9))
    drafted = []
    for _ in range(3):
        drafter._host_s += 0.5
        decoder._record_time([row], 4.0, is_round=True)
        drafted.append(row.part_s["draft"])
    assert drafted == [0.0, 1.0, 2.5]
    assert sum(row.part_s.values()) == 12.0

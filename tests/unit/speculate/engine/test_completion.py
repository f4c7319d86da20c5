"""Which drafted tokens of a round enter the acceptance rate."""

from dataclasses import replace

import pytest

from llama_ssp.reports.summary import acceptance_rate
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.state import Request
from tests.helpers.runs import FAST


def examined_of(accepted: list[int], *, room: int, ended_in_draft: bool = False) -> list[int]:
    """Of rounds with K = 4, the first of which has room for so many tokens."""
    request = Request(index=0, prompt_ids=(1,), max_new_tokens=room + 1)
    lengths = [4] * len(accepted)
    return RowCompletion(
        request=request, accepted_lengths=accepted, draft_lengths=lengths, ended_in_draft=ended_in_draft
    ).examined_lengths


@pytest.mark.parametrize(
    ("num_accepted", "room", "ended_in_draft", "expected"),
    [(0, 9, False, 1), (3, 9, False, 4), (4, 9, False, 4), (2, 9, True, 2), (4, 5, False, 4), (0, 4, False, 0)],
)
def test_a_round_examines_up_to_its_first_rejection(
    num_accepted: int, room: int, ended_in_draft: bool, expected: int
) -> None:
    assert examined_of([num_accepted], room=room, ended_in_draft=ended_in_draft) == [expected]


def test_rounds_near_the_length_limit_do_not_bias_the_acceptance_rate() -> None:
    """With 9 in 10 drafted tokens accepted (a fixed cycle of outcomes), short texts report the same 9 in 10."""
    outcomes = [4, 4, 1, 4, 4, 0, 4, 4, 3, 4, 4, 2]
    lines = []
    for first in range(len(outcomes)):
        accepted, room, step = [], 12, first
        while room > 0:
            drawn = outcomes[step % len(outcomes)]
            accepted.append(min(drawn, room))
            room -= drawn + 1
            step += 1
        examined = examined_of(accepted, room=12)
        lines.append(replace(FAST, num_rounds=len(accepted), accepted_lengths=accepted, examined_lengths=examined))
    expected = sum(outcomes) / sum(min(outcome + 1, 4) for outcome in outcomes)
    assert acceptance_rate(lines) == pytest.approx(expected, abs=0.03)

"""What ranks tell each other in a round: as few bytes as the placement allows."""

from dataclasses import replace

import pytest

from llama_ssp.planning.timing import round_messages
from llama_ssp.settings.schema import DraftLayout
from tests.helpers.planning import make_job

VOCABULARY, ROWS, K = 32000, 3, 4
ID = 8
ONE_RANK, SHARDED, REPLICATED, OWN_GPU = DraftLayout


@pytest.mark.parametrize(
    ("kind", "target", "draft", "arriving"),
    [
        (ONE_RANK, [0], [0], [0, 0, 0]),
        (ONE_RANK, [0, 1], [1], [ID * ROWS * K, 0, 3 * ID * ROWS]),
        (SHARDED, [0, 1], [0, 1], [ID * ROWS * K, 0, 3 * ID * ROWS]),
        (SHARDED, [0, 1, 2], [0, 1], [2 * ID * ROWS * K, 0, 2 * 3 * ID * ROWS]),
        (REPLICATED, [0, 1], [0, 1], [2 * ID * 2 * K, 0, 2 * 3 * ID * 2]),
        (OWN_GPU, [0, 1], [2], [2 * ID * ROWS * K, 4 * ROWS * K * VOCABULARY, 2 * 3 * ID * ROWS]),
        (OWN_GPU, [0], [1, 2], [2 * ID * ROWS * K, 4 * ROWS * K * VOCABULARY, 2 * 3 * ID * ROWS]),
    ],
)
def test_the_bytes_of_a_round_follow_from_the_placement(
    kind: DraftLayout, target: list[int], draft: list[int], arriving: list[int]
) -> None:
    """Ids, probabilities, verdict."""
    job = replace(
        make_job("13B", "7B", num_draft_tokens=K, batch_size=ROWS),
        draft_kind=kind, target_ranks=tuple(target), draft_ranks=tuple(draft),
    )  # fmt: skip
    found = round_messages(job, K)
    kinds = ("ids", "probabilities", "verdict")
    assert [found[kind].received_bytes if kind in found else 0 for kind in kinds] == arriving


def test_greedy_drafts_need_no_probabilities_elsewhere() -> None:
    job = replace(make_job("13B", "7B"), draft_kind=OWN_GPU, draft_ranks=(1,), rule="greedy")
    assert "probabilities" not in round_messages(job, K)


def test_a_plain_token_has_the_verdict_alone() -> None:
    job = make_job("13B", "7B", num_ranks=2, draft_kind=SHARDED)
    assert [*round_messages(job, 0)] == ["verdict"]

"""Statistics of what is timed in turns."""

import pytest

from llama_ssp.run.calibration.interleave import trimmed_mean


@pytest.mark.parametrize(
    ("turns", "mean"),
    [([3.0], 3.0), ([3.0, 1.0], 1.0), ([9.0, 2.0, 1.0], 1.5), ([*range(10)], 4.0), ([*range(20)], 8.5)],
    ids=["one", "two", "three", "ten", "twenty"],
)
def test_the_slowest_tenth_of_several_turns_does_not_count(turns: list[float], mean: float) -> None:
    assert trimmed_mean(turns) == mean


def test_trimmed_means_of_parts_that_stall_together_add_up() -> None:
    draft, verify = [1.0, 2.0, 3.0, 10.0], [4.0, 6.0, 5.0, 20.0]
    rounds = [a + b for a, b in zip(draft, verify, strict=True)]
    assert trimmed_mean(rounds) == trimmed_mean(draft) + trimmed_mean(verify)

"""When the one step is taken instead of NCCL; the step itself needs several GPUs."""

import pytest
import torch

from llama_ssp.distributed.one_shot import SIZES, OneShot, largest_gain

FASTER, SLOWER = (1e-6, 2e-6), (3e-6, 2e-6)


@pytest.mark.parametrize(
    ("first", "second", "most_bytes"),
    [
        ([FASTER] * 5, [FASTER] * 5, SIZES[-1]),
        ([FASTER] * 3 + [SLOWER] * 2, [FASTER] * 5, SIZES[2]),
        ([FASTER] * 5, [FASTER, None, FASTER, FASTER, FASTER], SIZES[0]),
        ([SLOWER] + [FASTER] * 4, [FASTER] * 5, 0),
        ([None] * 5, [FASTER] * 5, 0),
    ],
    ids=[
        "always faster",
        "small ones are faster on the slowest rank",
        "wrong on one rank",
        "slow from the start",
        "wrong",
    ],
)
def test_it_pays_up_to_the_largest_message_that_all_ranks_got_right_and_sooner(
    first: list[tuple[float, float] | None], second: list[tuple[float, float] | None], most_bytes: int
) -> None:
    assert largest_gain([first, second]) == most_bytes


def test_only_short_aligned_numbers_go_that_way() -> None:
    class Group:
        group_name = "0"

    end = OneShot({}, group=Group(), most_bytes=64)  # type: ignore[arg-type]
    assert end.takes(torch.zeros(16))
    assert end.takes(torch.zeros(32, dtype=torch.float16))
    assert not end.takes(torch.zeros(17))
    assert not end.takes(torch.zeros(20, dtype=torch.float16))
    assert not end.takes(torch.zeros(2, 3))
    assert not end.takes(torch.zeros(4, dtype=torch.int64))

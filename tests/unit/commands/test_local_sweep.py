"""A sweep on this machine: all points are checked before the first one starts."""

from pathlib import Path

import pytest

from tests.helpers.in_process import launch

pytestmark = pytest.mark.seconds


def test_a_mistake_at_one_point_keeps_all_points_from_starting(tmp_path: Path) -> None:
    ended = launch("-m", "speculation.num_draft_tokens=4,0,2,-1", f"run_dir={tmp_path}/sweep")
    assert ended.code == 2
    begun, *problems = ended.err.splitlines()
    assert begun.startswith("2 problems")
    assert [problem.split(" run_dir=")[0] for problem in problems] == [
        "  1. job 1 (speculation.num_draft_tokens=0",
        "  2. job 3 (speculation.num_draft_tokens=-1",
    ]
    assert not (tmp_path / "sweep").exists()


@pytest.mark.heavy
def test_a_point_that_does_not_fit_keeps_all_points_from_starting(tmp_path: Path) -> None:
    ended = launch("-m", "hardware=g5_12xlarge", "model=tiny,65B", "draft=default", f"run_dir={tmp_path}/sweep")
    assert ended.code == 3
    assert ended.err.startswith("job 1 (")
    assert "the smallest change that fits" in ended.err
    assert not (tmp_path / "sweep").exists()

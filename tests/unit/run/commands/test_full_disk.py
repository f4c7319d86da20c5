"""A disk that is full, at any moment of a run: one sentence, and once there is room the run is completed."""

import resource
from pathlib import Path

import pytest

from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy, slow

pytestmark = pytest.mark.seconds

NUM_SAMPLES = 12


def complete(run_dir: Path) -> Ended:
    return launch(
        "task=generate", "prompt=import os", "max_new_tokens=24", f"num_samples={NUM_SAMPLES}", "ignore_eos=true",
        "device=cpu", f"run_dir={run_dir}",
    )  # fmt: skip


@pytest.mark.parametrize("num_bytes", [slow(1), heavy(3000)], ids=["not even for a lock", "for some completions"])
def test_a_full_disk_ends_a_run_in_a_sentence_and_with_more_room_it_is_completed(
    num_bytes: int, tmp_path: Path
) -> None:
    """No file may be longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        ended = complete(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.code == 2, ended.err
    *progress, sentence = ended.err.splitlines()
    assert all(f"of {NUM_SAMPLES} completions" in line for line in progress), ended.err
    assert "free some space and give the same command" in sentence, ended.err
    ended = complete(tmp_path / "run")
    assert ended.code == 0, ended.err
    assert [line["sample"] for line in ended.lines] == [*range(NUM_SAMPLES)]
    assert ended.status == "done\n"
    assert not list((tmp_path / "run").glob("*.tmp"))

"""A disk that is full, at any moment of a run: one sentence, and once there is room the run is completed."""

import contextlib
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy, slow

pytestmark = pytest.mark.seconds

Room = Callable[[int], AbstractContextManager[None]]
NUM_SAMPLES = 12
PLENTY = 1 << 24
# What there is room for: on a small disk for the lock alone, or for some completions; where files must be short, for
# not even that, or for some completions.
CASES = [
    slow("a small disk", 4096), heavy("a small disk", 5 * 4096), slow("short files", 1), heavy("short files", 3000),
]  # fmt: skip


@pytest.fixture
def room(kind: str, tmp_path: Path) -> Iterator[Room]:
    """A function that leaves so many bytes of room in `tmp_path / "disk"` for a block: all files, or each of them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if kind == "short files":
        yield longest_file
        return
    mount = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mount.stderr.strip()}")

    @contextlib.contextmanager
    def size(num_bytes: int) -> Iterator[None]:
        subprocess.run(["mount", "-o", f"remount,size={num_bytes}", disk], check=True)
        yield

    yield size
    subprocess.run(["umount", "--lazy", disk], check=True)


@contextlib.contextmanager
def longest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def complete(run_dir: Path) -> Ended:
    return launch(
        "task=generate", "prompt=import os", "max_new_tokens=24", f"num_samples={NUM_SAMPLES}", "ignore_eos=true",
        "device=cpu", f"run_dir={run_dir}",
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "num_bytes"), CASES)
@pytest.mark.usefixtures("kind")
def test_a_full_disk_ends_a_run_in_a_sentence_and_with_more_room_it_is_completed(
    num_bytes: int, room: Room, tmp_path: Path
) -> None:
    run_dir = tmp_path / "disk" / "run"
    with room(num_bytes):
        ended = complete(run_dir)
    assert ended.code == 2, ended.err
    *progress, sentence = ended.err.splitlines()
    assert all(f"of {NUM_SAMPLES} completions" in line for line in progress), ended.err
    assert "free some space and give the same command" in sentence, ended.err
    with room(PLENTY):
        ended = complete(run_dir)
    assert ended.code == 0, ended.err
    assert [line["sample"] for line in ended.lines] == [*range(NUM_SAMPLES)]
    assert ended.status == "done\n"
    assert not list(run_dir.glob("*.tmp"))

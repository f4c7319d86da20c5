"""Ranks that share memory: the same sums to the last bit, no message lost, and peers that die or stall are named."""

import contextlib
import errno
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.extensions.cpu import shared_memory
from llama_ssp.extensions.cpu.shared_memory import SharedMemoryGroup
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT

# Ranks are processes that part after the imports; while they join, texts go through a file.
RANKS = """
import json, os, random, signal, sys, time
from itertools import count
from pathlib import Path
import torch
from torch.distributed import FileStore
from llama_ssp.extensions.cpu.shared_memory import SharedMemoryGroup

scenario, size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

def gather_text(text):
    step = next(steps)
    if text.startswith("/"):
        (folder / "shared").write_text(text)
    store.set(f"{step}-{rank}", text)
    return [store.get(f"{step}-{peer}").decode() for peer in range(size)]

def is_right(board, number, parts):
    firsts, src = [part[:, :3].contiguous() if number % 2 else part[0, 0].clone() for part in parts], number % size
    values = firsts[rank].clone()
    if number % 3 == 0:
        board.all_reduce(values)
        return values.equal(sum(firsts))  # in the order of ranks, so the same bits
    if number % 3 == 1:
        return board.all_gather_last(parts[rank], tuple(len(part[0]) for part in parts)).equal(torch.cat(parts, -1))
    board.deliver(values, src=src)
    return values.equal(firsts[src])

def messages(board):
    pause, draw = random.Random(rank), torch.Generator().manual_seed(0)
    for number in range(600):
        dtype = (torch.float32, torch.int64, torch.bfloat16)[number // 6 % 3]
        parts = [torch.randn(2, 3 + peer + number % 5, generator=draw).mul(9).to(dtype) for peer in range(size)]
        if pause.random() < 0.02:
            time.sleep(pause.random() * 0.004)
        with torch.inference_mode(mode=number // 30 % 2 == 0):  # what one mode has made, the other one writes to
            assert is_right(board, number, parts), number
    for number in range(200):  # long ones: who reads before all is written finds an old number at the end
        src, dst = number % size, (number + 1) % size
        values = torch.full((200_000,), float(number if rank == src else -1))
        board.deliver(values, src=src)
        assert values.eq(number).all()
        values = torch.full((100_000,), float(-number if rank == src else 1))
        board.deliver(values if rank in (src, dst) else None, src=src)
        assert values.eq(-number if rank in (src, dst) else 1).all()

def fails(board):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if scenario == "dies" else signal.SIGSTOP)
    board.timeout_s = 1.0
    began = time.monotonic()
    try:
        board.all_reduce(torch.zeros(3))
    except torch.distributed.DistBackendError as error:
        return [str(error), time.monotonic() - began]

torch.set_num_threads(1)
pids = []
for rank in range(size):
    if pid := os.fork():
        pids.append(pid)
        continue
    steps, store = count(), FileStore(str(folder / "store"), -1)
    board = SharedMemoryGroup.join(gather_text, rank=rank, size=size, crowded=size > 2)
    said = (messages if scenario == "messages" else fails)(board)
    (folder / f"said-{rank}").write_text(json.dumps(said))
    os._exit(0)
deadline = time.monotonic() + 60
while pids and time.monotonic() < deadline:
    pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    if scenario == "stalls" and len(pids) == 1:
        break
    time.sleep(0.01)
for pid in pids:
    os.kill(pid, signal.SIGKILL)
"""


def run(scenario: str, size: int, folder: Path) -> dict[int, Any]:
    """What each rank said at its end."""
    command = [sys.executable, "-c", RANKS, scenario, str(size), str(folder)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=90)
    assert result.returncode == 0, result.stderr
    said = {int(path.name.removeprefix("said-")): json.loads(path.read_text()) for path in folder.glob("said-*")}
    assert said, result.stderr
    return said


@pytest.mark.parametrize("size", [slow(2), heavy(3)])
def test_no_message_is_lost_and_all_ranks_get_the_same_bits(size: int, tmp_path: Path) -> None:
    assert set(run("messages", size, tmp_path)) == set(range(size))
    assert not Path((tmp_path / "shared").read_text()).exists()


@pytest.mark.seconds
@pytest.mark.parametrize(("scenario", "words"), [("dies", "has ended"), heavy("stalls", "timed out after 1 s")])
def test_a_peer_that_is_missing_is_named(scenario: str, words: str, tmp_path: Path) -> None:
    said = run(scenario, 3, tmp_path)
    assert set(said) == {0, 2}
    for sentence, seconds in said.values():
        assert "rank 1 of the group" in sentence
        assert words in sentence
        assert seconds < 30


def test_a_rank_that_cannot_open_the_memory_has_no_board() -> None:
    texts = iter([["/dev/shm/of-another-node", ""], ["joined", ""]])
    assert SharedMemoryGroup.join(lambda _: next(texts), rank=1, size=2, crowded=False) is None


def test_a_folder_that_cannot_be_written_leaves_the_messages_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the kernel refuses files from root as well, as /dev/shm mounted read-only does."""
    monkeypatch.setattr(shared_memory, "_FOLDER", Path("/proc"))
    unlink = Path.unlink

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path.parent == Path("/proc"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert SharedMemoryGroup.join(lambda text: [text, ""], rank=0, size=2, crowded=False) is None


@pytest.mark.skipif(not shared_memory._may_share(), reason="no memory to share here")
@pytest.mark.parametrize("step", ["made", "told", "joined", "alone"])
def test_nothing_is_left_when_joining_ends_early(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    steps = iter(["told", "joined"])

    def gather_text(text: str) -> list[str]:
        if next(steps) == step:
            raise KeyboardInterrupt
        return [text, "" if text == "joined" else text]

    def make(path: str, _size: int) -> int | None:
        Path(path).touch()
        raise KeyboardInterrupt

    if step == "made":
        monkeypatch.setattr(shared_memory, "_make", make)
    before = set(Path("/proc/self/fd").iterdir())
    with contextlib.suppress(KeyboardInterrupt):
        assert SharedMemoryGroup.join(gather_text, rank=0, size=2, crowded=False) is None
    gc.collect()  # an end that is not kept takes its mapping, and the descriptor of that, with it
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert not list(tmp_path.iterdir())

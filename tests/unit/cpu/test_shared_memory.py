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

from llama_ssp.cpu import shared_memory
from llama_ssp.cpu.shared_memory import SharedMemoryGroup
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT

# Ranks are processes that part after the imports; what they tell each other while they join goes through files.
RANKS = """
import json, os, random, signal, sys, time
from itertools import count
from pathlib import Path
import torch
from llama_ssp.cpu import shared_memory

def exchange(rank, size, folder, steps):
    def gather_text(text):
        step = next(steps)
        (folder / f"{step}-{rank}.new").write_text(text)
        (folder / f"{step}-{rank}.new").rename(folder / f"{step}-{rank}")
        paths = [folder / f"{step}-{peer}" for peer in range(size)]
        while not all(path.exists() for path in paths):
            time.sleep(0.001)
        return [path.read_text() for path in paths]
    return gather_text

sums = []

def is_right(board, number, parts, widths, rank):
    firsts = [part[:, :3].contiguous() for part in parts]
    values = firsts[rank].clone()
    if number % 3 == 0:
        board.all_reduce(values)
        sums.append(values.tolist())
        return torch.allclose(values, sum(firsts), atol=1e-6)
    if number % 3 == 1:
        return board.all_gather_last(parts[rank], widths).equal(torch.cat(parts, -1))
    board.deliver(values, src=number % len(parts))
    return values.equal(firsts[number % len(parts)])

def messages(board, rank, size):
    torch.manual_seed(rank)
    pause = random.Random(rank)
    expect = [torch.Generator().manual_seed(peer) for peer in range(size)]
    for number in range(600):
        widths = tuple(3 + peer + number % 5 for peer in range(size))
        parts = [torch.randn(2, width, generator=generator) for width, generator in zip(widths, expect)]
        if pause.random() < 0.02:
            time.sleep(pause.random() * 0.004)
        with torch.inference_mode(mode=number // 30 % 2 == 0):  # what one mode has made, the other one writes to
            assert is_right(board, number, parts, widths, rank), number
    for number in range(200):  # long ones: who reads before all is written finds an old number at the end
        values = torch.full((200_000,), float(number if rank == number % size else -1))
        board.deliver(values, src=number % size)
        assert values.eq(number).all()
        src, dst = number % size, (number + 1) % size
        values = torch.full((100_000,), float(-number if rank == src else 1))
        board.deliver(values if rank in (src, dst) else None, src=src)
        assert values.eq(-number if rank in (src, dst) else 1).all()
    words = torch.tensor([[rank, 7]])
    board.all_reduce(words)
    assert words.tolist() == [[size * (size - 1) // 2, 7 * size]]
    single = torch.tensor(float(rank))
    board.all_reduce(single)
    assert single == size * (size - 1) / 2
    halves = torch.ones(5, dtype=torch.bfloat16)
    board.all_reduce(halves)
    assert halves.eq(size).all()
    return sums

def fails(board, rank, size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if scenario == "dies" else signal.SIGSTOP)
    board.timeout_s = 1.0
    began = time.monotonic()
    try:
        board.all_reduce(torch.zeros(3))
    except torch.distributed.DistBackendError as error:
        return [str(error), time.monotonic() - began]

def cannot(board, rank, size):
    return "without" if board is None else "with"

scenario, size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
pids = []
for rank in range(size):
    if pid := os.fork():
        pids.append(pid)
        continue
    if scenario == "cannot" and rank == size - 1:
        os.open = lambda *_: (_ for _ in ()).throw(FileNotFoundError())
    gather_text = exchange(rank, size, folder, count())
    board = shared_memory.SharedMemoryGroup.join(gather_text, rank=rank, size=size, crowded=size > 2)
    act = {"messages": messages, "cannot": cannot}.get(scenario, fails)
    said = act(board, rank, size)
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


@pytest.mark.parametrize("size", [slow(2), 3])
def test_no_message_is_lost_and_all_ranks_get_the_same_bits(size: int, tmp_path: Path) -> None:
    sums = run("messages", size, tmp_path)
    assert set(sums) == set(range(size))
    assert all(sums[rank] == sums[0] for rank in sums)
    assert not Path((tmp_path / "0-0").read_text()).exists()


@pytest.mark.parametrize(("scenario", "words"), [("dies", "has ended"), heavy("stalls", "timed out after 1 s")])
def test_a_peer_that_is_missing_is_named(scenario: str, words: str, tmp_path: Path) -> None:
    said = run(scenario, 3, tmp_path)
    assert set(said) == {0, 2}
    for sentence, seconds in said.values():
        assert "rank 1 of the group" in sentence
        assert words in sentence
        assert seconds < 3


def test_ranks_that_share_no_memory_have_no_board(tmp_path: Path) -> None:
    assert run("cannot", 2, tmp_path) == {0: "without", 1: "without"}


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

"""Captures and injected faults on the stub device."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.disturbed import lines, wait_for
from tests.helpers.gpu_faults import AT_MOST_S, CELLS, FULL, KILLED, STUCK, Cell, arguments, check_sentence, steps
from tests.stub_gpu.build import Stub, end
from tests.stub_gpu.settings import BROKEN, GROUPS, PLAIN, Group, Setting

pytestmark = pytest.mark.gpu_stub
Left = dict[str, Any]
CASES = [
    pytest.param(group, setting, id=f"{group.name}: {setting.name}")
    for group in GROUPS
    for setting in group.settings
    if setting is not BROKEN
]


@pytest.fixture(scope="module")
def left(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Left]]:
    """What every setting of every group left; all of them decode in one process."""
    folder = tmp_path_factory.mktemp("matrix")
    out, said = folder / "left.json", folder / "said"
    process = stub.start("-m", "tests.stub_gpu.matrix", out, output=said)
    try:
        assert process.wait(900) == 0, said.read_text()
    finally:
        end(process)
    found: dict[str, dict[str, Left]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(("group", "setting"), CASES)
def test_rounds_are_captured_without_a_fault(left: dict[str, dict[str, Left]], group: Group, setting: Setting) -> None:
    found = left[group.name][setting.name]
    assert found["is_captured"]
    assert found["faults"] == []
    assert found["finished"] == setting.batch_size
    assert all(found["nodes"])


@pytest.mark.parametrize("name", ["sampled, batch 1", "sampled, batch 4", "plain, batch 1", "plain, batch 4"])
def test_between_rounds_are_the_launches_one_pinned_copy_and_at_most_one_wait(
    left: dict[str, dict[str, Left]], name: str
) -> None:
    found = left["fp16"][name]["between"]
    num_launches = sum(line.startswith("replay") for line in found)
    copies = [line for line in found if line.startswith("copy device->pinned")]
    waits = [line for line in found if line == "wait event"]
    assert num_launches == (1 if name.startswith(PLAIN) else 2)
    assert len(copies) == 1
    assert len(waits) <= 1
    assert len(found) == num_launches + len(copies) + len(waits), found


def test_a_capture_that_fails_leaves_the_run_going(left: dict[str, dict[str, Left]]) -> None:
    found = left["fp16"][BROKEN.name]
    assert not found["is_captured"]
    assert any("cudaStreamSynchronize" in fault for fault in found["faults"])
    assert found["finished"] == BROKEN.batch_size


class Job(NamedTuple):
    """Both ranks, their output, and the folder that fills the device of the one that is to be lost."""

    ranks: list[subprocess.Popen[str]]
    outputs: list[Path]
    control: Path

    def said(self) -> list[str]:
        return [line for file in self.outputs for line in file.read_text().splitlines()]


@pytest.fixture
def job(stub: Stub, cell: Cell, tmp_path: Path) -> Iterator[Job]:
    control, outputs, ranks = tmp_path / "control", [tmp_path / f"{rank}.txt" for rank in (0, 1)], []
    control.mkdir()
    for rank, step in enumerate(steps()):
        settings: dict[str, Any] = {**step, "STUB_GPU_COUNT": 2}
        if rank == cell.rank:
            settings["STUB_GPU_CONTROL"] = control
        ranks.append(stub.start(*arguments(cell, tmp_path), output=outputs[rank], **settings))
    try:
        wait_for(
            lambda: len(lines(tmp_path / "run")) > 1 or any(each.poll() is not None for each in ranks), at_most_s=300
        )
        yield Job(ranks, outputs, control)
    finally:
        for each in ranks:
            end(each)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rank_lost_on_a_gpu_ends_the_run_in_time_with_sentence_and_status(
    cell: Cell, job: Job, tmp_path: Path
) -> None:
    victim, other = job.ranks[cell.rank], job.ranks[1 - cell.rank]
    assert (victim.poll(), other.poll()) == (None, None), job.said()
    if cell.fault == FULL:
        (job.control / "full").touch()
        assert [each.wait(AT_MOST_S[FULL]) for each in job.ranks] == [3, 3], job.said()
    else:
        victim.send_signal(signal.SIGKILL if cell.fault == KILLED else signal.SIGSTOP)
        assert other.wait(AT_MOST_S[cell.fault]) == 1, job.said()
    check_sentence(cell, tmp_path / "run", job.said())


HANGING = Cell(STUCK, cuda_graphs=True, task="generate", rank=1, num_replicas=2, batch_size=2)


@pytest.mark.parametrize("cell", [HANGING], ids=str)
def test_a_gpu_that_hangs_is_given_up_in_time_although_another_replica_is_at_work(
    cell: Cell, job: Job, tmp_path: Path
) -> None:
    """The other replica ends its share, and its host then waits without its GPU."""
    (job.control / "stuck").touch()
    assert [each.wait(AT_MOST_S[STUCK]) for each in job.ranks] == [1, 1], job.said()
    check_sentence(cell, tmp_path / "run", job.said())

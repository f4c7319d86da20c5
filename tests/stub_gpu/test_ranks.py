"""Two ranks on stub devices: messages arrive, replays wait for the peer, and no graph outlives its communicator."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stub_gpu.process import Stub, lines_of
from tests.stub_gpu.ranks import LATE_S

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank of `ranks` has seen."""
    out = tmp_path_factory.mktemp("ranks")
    stub.run("-m", "tests.stub_gpu.ranks", out, ranks=2, STUB_GPU_JOURNAL=out / "journal")
    assert len(lines_of(out / "journal", about="graphs that use it: 0")) >= 2
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_small_messages_of_the_host_arrive(seen: Seen) -> None:
    assert [rank["bytes"] for rank in seen] == [[[1, 10], [2, 20], [7]]] * 2


def test_a_replay_is_launched_at_once_and_ends_when_its_peer_has_come(seen: Seen) -> None:
    first, second = (rank["replay"] for rank in seen)
    assert first["nodes"] == second["nodes"] == ["kernel", "nccl"]
    assert first["faults"] == second["faults"] == []
    assert first["launched_s"] < LATE_S / 2 < first["passed_s"]
    assert second["passed_s"] < LATE_S / 2


def test_a_run_on_two_devices_is_captured_and_leaves_no_graph_to_its_communicators(stub: Stub, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    output = stub.run(
        "launch/run.py", "device=cuda", "task=generate", "prompt=import os", "max_new_tokens=16", "ignore_eos=true",
        f"run_dir={tmp_path / 'run'}", ranks=2, STUB_GPU_JOURNAL=journal,
    )  # fmt: skip
    assert (tmp_path / "run" / "status").read_text().startswith("done")
    assert "continuing without CUDA graphs" not in output
    assert "deprecated" not in output
    assert lines_of(journal, about="fault") == []
    ends = lines_of(journal, about="graphs that use it")
    assert ends
    assert all(line.endswith(": 0") for line in ends), ends

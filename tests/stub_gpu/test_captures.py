"""Every setting and family runs as graphs without a fault; between two rounds the host does no more than it must."""

import json
from typing import Any

import pytest

from tests.stub_gpu.process import Stub
from tests.stub_gpu.settings import BROKEN, GROUPS, PLAIN, Group, Setting

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
    out = tmp_path_factory.mktemp("matrix") / "left.json"
    stub.run("-m", "tests.stub_gpu.matrix", out, *(group.name for group in GROUPS), timeout_s=900)
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

"""What graphs of batches whose rows have settings of their own take of a GPU, on the stub device."""

import json
from typing import Any

import pytest

from llama_ssp.architectures.engine import sets_of_steps
from tests.stub_gpu.build import Stub, end

NUM_ROWS = 32
pytestmark = pytest.mark.gpu_stub


@pytest.fixture(scope="module")
def left(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What 40 mixtures of settings left, and batches whose captures found no memory."""
    folder = tmp_path_factory.mktemp("mixtures")
    out, said = folder / "left.json", folder / "said"
    process = stub.start("-m", "tests.stub_gpu.mixtures", out, output=said, STUB_GPU_CONTROL=folder)
    try:
        assert process.wait(600) == 0, said.read_text()
    finally:
        end(process)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_graphs_take_no_more_after_forty_mixtures_than_after_two(left: dict[str, Any]) -> None:
    found = left["measured"]
    assert len(found["pools"]) == 40
    assert found["pools"][-1] <= 1.1 * found["pools"][1]
    assert found["finished"] == [NUM_ROWS] * 40
    assert found["failed"] == 0
    assert found["graphs"] == 2 * sets_of_steps(NUM_ROWS)


def test_a_plan_counts_what_graphs_and_laws_of_all_mixtures_take(left: dict[str, Any]) -> None:
    found = left["measured"]
    assert found["planned_bytes"] == pytest.approx(found["most_bytes"], rel=0.02)
    assert found["planned_plain_bytes"] < found["most_bytes"] / 5


def test_a_capture_that_finds_no_memory_costs_its_stage_alone(left: dict[str, Any]) -> None:
    found = left["without memory"]
    assert found["finished"] == [NUM_ROWS] * 6
    first, refused, again, captured, *last = found["graphs"]
    assert (first, refused, captured, last) == (2, 2, again + 2, [captured] * 2)
    assert {*found["failed"]} == {"draft", "verify"}

"""What computes on two devices of one process does not get in its own way."""

import json
from typing import Any

import pytest

from tests.stub_gpu.process import Stub


def test_each_pair_is_captured_on_its_own_device(stub: Stub) -> None:
    found = json.loads(stub.run("-m", "tests.stub_gpu.two_pairs", STUB_GPU_COUNT=2).splitlines()[-1])
    assert found == {"captured": 4, "faults": []}


@pytest.fixture(scope="module")
def seen(stub: Stub) -> dict[str, dict[str, Any]]:
    """What `own_device` has seen of each part."""
    found: dict[str, dict[str, Any]] = json.loads(
        stub.run("-m", "tests.stub_gpu.own_device", STUB_GPU_COUNT=2).splitlines()[-1]
    )
    return found


def test_operators_are_captured_on_the_device_that_is_measured(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["operators"] == {"captured": [200, 200], "faults": [], "current": 0}


def test_the_harness_computes_on_its_own_device(seen: dict[str, dict[str, Any]]) -> None:
    answers, scores = seen["answers"], seen["scores"]
    assert len(answers["captured"]) == 2
    assert min(answers["captured"]) > 0
    assert answers["faults"] == scores["faults"] == []


@pytest.mark.parametrize("part", ["load", "answers", "scores"])
def test_the_current_device_is_what_it_was(seen: dict[str, dict[str, Any]], part: str) -> None:
    assert seen[part]["current"] == 0

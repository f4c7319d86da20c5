"""The stub device itself: the rules of capture hold, bytes of the host survive, and kernels compute nothing."""

import json
from typing import Any

import pytest

from tests.stub_gpu.process import Stub

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(stub: Stub) -> Found:
    """What each case of `captures` left."""
    cases: Found = json.loads(stub.run("-m", "tests.stub_gpu.captures").splitlines()[-1])
    return cases


def test_a_capture_holds_the_launches_in_their_order_and_a_replay_is_one_launch(found: Found) -> None:
    product = found["product"]
    assert product["error"] is None
    assert [kind for kind, _ in product["nodes"]] == ["gemm", "kernel"]
    assert [kind for kind, _ in product["log"] if kind not in {"wait", "module"}] == ["captured", "replay", "replay"]


def test_a_stream_that_joins_is_part_of_the_capture(found: Found) -> None:
    assert (found["joined"]["error"], len(found["joined"]["nodes"])) == (None, 1)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unjoined", "was not joined"),
        ("reads a value", "cudaStreamSynchronize"),
        ("queries an event", "cudaEventQuery"),
    ],
)
def test_what_a_gpu_does_not_allow_in_a_capture_breaks_it(found: Found, name: str, why: str) -> None:
    assert found[name]["error"]
    assert any(why in text for kind, text in found[name]["log"] if kind == "fault")
